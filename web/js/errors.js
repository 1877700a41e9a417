// A UserError (errors.py) in one sentence, at once: of a graph that was rejected, and of a run that failed.
//
// Kept because the editor would otherwise show the sentence behind two clicks: of a rejected graph it says only which input is wrong, and
// of a failed run that one failed. This script shows the sentence in a toast. It changes nothing else: the editor's report keeps the stack
// trace, which a bug report needs.
//
// A rejected graph raises no event of the editor, so that its answer is read where it arrives, in api.queuePrompt.
import { api } from "../../../scripts/api.js"
import { app } from "../../../scripts/app.js"

const USER_ERROR = "fastar.UserError"

// Characters and toasts that are shown: a graph may hold a thousand nodes, and a title of any length.
const LONGEST = 400
const MOST_TOASTS = 3

/** A toast. The editor shows its texts as they are, not as HTML or Markdown. */
const tell = (id, type, detail) =>
  app.extensionManager?.toast?.add({
    severity: "error",
    summary: String(app.graph?.getNodeById?.(id)?.title ?? type).slice(0, 80),
    detail: String(detail).slice(0, LONGEST),
    life: 30000,
  })

/** The sentence of a run that failed. */
function tellFailure({ detail }) {
  if (detail?.exception_type === USER_ERROR) tell(detail.node_id, detail.node_type, detail.exception_message.trim())
}

/** The reasons that our nodes gave for rejecting a graph; ComfyUI writes "input - reason". */
function tellReasons(rejected) {
  const reasons = []
  for (const [id, { class_type, errors }] of Object.entries(rejected ?? {}))
    for (const { type, details } of errors)
      if (class_type.startsWith("FastAR") && type === "custom_validation_failed")
        reasons.push([id, class_type, details.replace(" - ", ": ")])

  for (const reason of reasons.slice(0, MOST_TOASTS)) tell(...reason)
  const more = reasons.length - MOST_TOASTS
  if (more > 0) tell(null, "FastAR", `${more} more nodes were refused for reasons of this kind.`)
}

app.registerExtension({
  name: "FastAR.Errors",
  init() {
    api.addEventListener("execution_error", tellFailure)
    const queue = api.queuePrompt
    api.queuePrompt = async function (...args) {
      try {
        const answer = await queue.apply(this, args)
        tellReasons(answer.node_errors)
        return answer
      } catch (problem) {
        tellReasons(problem.response?.node_errors)
        throw problem
      }
    }
  },
})
