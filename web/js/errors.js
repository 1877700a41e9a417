// A UserError (errors.py) in one sentence, at once: of a graph that was rejected, and of a run that failed.
//
// Kept because the editor would otherwise show the sentence behind two clicks: of a rejected graph it says only which input is wrong, and
// of a failed run that one failed. The editor's report keeps the stack trace, which a bug report needs.
//
// A rejected graph raises no event of the editor, so that its answer is read where it arrives, in api.queuePrompt.
import { api } from "../../../scripts/api.js"
import { app } from "../../../scripts/app.js"
import { LONGEST, remove, tell } from "./messages.js"
import { say } from "./words.js"

const USER_ERROR = "fastar.UserError"

/** The sentence of a run that failed. */
function tellFailure({ detail }) {
  if (detail?.exception_type === USER_ERROR) tell(detail.node_id, detail.node_type, String(detail.exception_message).trim())
}

/** ComfyUI writes "input - reason", for every input that the node checks; a reason of a node that checks several names the input itself. */
function sentenceOf(details) {
  const [input, ...rest] = details.split(" - ")
  const reason = rest.join(" - ")
  return /^\w+: /.test(reason) ? reason : `${input}: ${reason}`
}

/** The tooltip of an input, which says what to connect to it; "" where the editor has none. */
function tooltipOf(node, input) {
  const about = LiteGraph.registered_node_types[node]?.nodeData?.input?.required?.[input]
  return about?.[1]?.tooltip ?? ""
}

/** Why the server refused an input of a node of this type: our own reason, or ComfyUI's with the name of the input. */
function reasonOf(node, { type, message, details, extra_info }) {
  if (type === "custom_validation_failed") return sentenceOf(details)
  if (type === "required_input_missing") return `${extra_info.input_name}: ${message}. ${tooltipOf(node, extra_info.input_name)}`.trim()
  if (type === "value_not_in_list") return details
  return `${extra_info?.input_name ?? details}: ${message}`
}

/** The first reason for which a graph was rejected at our nodes, and how many more there are. */
function tellReasons(rejected) {
  const reasons = []
  for (const [id, { class_type, errors }] of Object.entries(rejected ?? {}))
    if (class_type?.startsWith("FastAR")) for (const error of errors ?? []) reasons.push([id, class_type, reasonOf(class_type, error)])
  if (!reasons.length) return

  const [id, type, sentence] = reasons[0]
  const others = new Set(reasons.map(([number]) => number)).size - 1
  let more = ""
  if (others === 1) more = ` ${say("1 more node was refused.")}`
  if (others > 1) more = ` ${say("{n} more nodes were refused.", others)}`
  tell(id, type, sentence.slice(0, LONGEST - more.length) + more)
}

app.registerExtension({
  name: "FastAR.Errors",
  init() {
    api.addEventListener("execution_error", tellFailure)
    const queue = api.queuePrompt
    api.queuePrompt = async function (...args) {
      remove()
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
