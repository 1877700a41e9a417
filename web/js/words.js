// What our scripts say, in the editor's language: the part "fastar" of locales/<language>/main.json.
//
// Kept because the editor offers its translations to its own code only. A sentence without a translation stays English.
import { api } from "../../../scripts/api.js"
import { app } from "../../../scripts/app.js"

let words = {}

/** An English sentence in the editor's language; "{n}" in it stands for a number or a name. */
export const say = (english, n = "") => (words[english] ?? english).replace("{n}", n)

app.registerExtension({
  name: "FastAR.Words",
  // The editor waits for it before it creates nodes.
  async init() {
    const language = app.extensionManager?.setting?.get("Comfy.Locale")
    if (!language || language === "en") return
    try {
      const response = await api.fetchApi("/i18n")
      words = (await response.json())[language]?.fastar ?? {}
    } catch (problem) {
      console.warn("FastAR: no translations", problem)
    }
  },
})
