// Sorts this pack's entries of the template browser by name.
//
// The server lists a folder in the order of the file system, which is arbitrary on Linux and macOS. The numbers in the names give the
// order in which to read the workflows.
import { api } from "../../../scripts/api.js"
import { app } from "../../../scripts/app.js"

// Identifies the pack's list: the list has the name of the pack's folder, which differs between installations.
const OWN = "04 FastHybrid vs MAR"

app.registerExtension({
  name: "FastAR.Templates",
  init() {
    const list = api.getWorkflowTemplates
    api.getWorkflowTemplates = async function (...args) {
      const templates = await list.apply(this, args)
      for (const names of Object.values(templates ?? {})) if (names.includes(OWN)) names.sort()
      return templates
    }
  },
})
