// Errors in a run that the user's input caused (UserError in errors.py): one sentence, without a stack trace.
//
// Kept because the editor would otherwise show the sentence behind two clicks, under a stack trace: the server reports every failed node
// with one. For a UserError this script shows the sentence in a toast and leaves the trace out of the editor's log. Other exceptions keep
// theirs, and so does the history of the server.
import { api } from "../../../scripts/api.js"
import { app } from "../../../scripts/app.js"

const USER_ERROR = "fastar.UserError"

function shorten({ detail }) {
  if (detail?.exception_type !== USER_ERROR) return
  detail.exception_type = "FastAR"
  detail.exception_message = detail.exception_message.trim()
  detail.traceback = []
  const node = app.graph?.getNodeById?.(detail.node_id)
  app.extensionManager?.toast?.add({
    severity: "error",
    summary: node?.title ?? detail.node_type,
    detail: detail.exception_message,
    life: 30000,
  })
}

app.registerExtension({
  name: "FastAR.Errors",
  init() {
    // Listeners of the capture phase run before the editor's own.
    api.addEventListener("execution_error", shorten, { capture: true })
  },
})
