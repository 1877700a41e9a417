// A UserError (errors.py) in one sentence, at once: of a graph that was rejected, and of a run that failed.
//
// Kept because the editor would otherwise show the sentence behind two clicks: of a rejected graph it says only which input is wrong, and
// of a failed run that one failed. This script shows the sentence in a message of its own, which stays until a click, the next run or another
// graph. The editor's messages cannot be placed: they would cover the node that is to be changed, or the button "View details".
// The editor's report keeps the stack trace, which a bug report needs.
//
// A rejected graph raises no event of the editor, so that its answer is read where it arrives, in api.queuePrompt.
import { api } from "../../../scripts/api.js"
import { app } from "../../../scripts/app.js"
import { shownOf, titleOf } from "./graphs.js"
import { say } from "./words.js"

const USER_ERROR = "fastar.UserError"

// Characters that are shown: a title may have any length.
const LONGEST = 400
const LONGEST_TITLE = 80

const STYLE = `
.fastar-message { position: fixed; z-index: 3000; width: 380px; padding: 12px 16px; border-radius: 8px; cursor: pointer;
  background: var(--comfy-menu-bg, #353535); color: var(--input-text, #ddd); border: 1px solid var(--error-text, #ff4444);
  font: 13px/1.4 sans-serif; box-shadow: 0 4px 16px #0008; overflow-wrap: anywhere; }
.fastar-message::after { content: "\u00d7"; position: absolute; top: 4px; right: 10px; font-size: 18px; opacity: 0.7; }
.fastar-message b { display: block; margin-bottom: 4px; }`

// Places on the screen, the best first. The upper right is the editor's: its messages and "View details" are there.
const GAP = 16
const TOP = 110 // below the tabs and the bar with the button Run
const LEFT = 80 // beside the sidebar
const PLACES = [
  (width, height) => [(innerWidth - width) / 2, innerHeight - height - GAP],
  (width, height) => [LEFT, innerHeight - height - GAP],
  () => [LEFT, TOP],
  (width) => [(innerWidth - width) / 2, TOP],
]

let shown = null // the message

function remove() {
  shown?.remove()
  shown = null
}

/** The node's rectangle on the screen, its title bar included. */
function rectangleOf(node) {
  const { canvas, ds } = app.canvas
  if (!node) return null
  const box = canvas.getBoundingClientRect()
  const title = LiteGraph.NODE_TITLE_HEIGHT
  const left = (node.pos[0] + ds.offset[0]) * ds.scale + box.left
  const top = (node.pos[1] - title + ds.offset[1]) * ds.scale + box.top
  return { left, top, right: left + node.size[0] * ds.scale, bottom: top + (node.size[1] + title) * ds.scale }
}

/** Pixels that two rectangles have in common. */
function common(a, b) {
  const width = Math.min(a.right, b.right) - Math.max(a.left, b.left)
  const height = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top)
  return Math.max(0, width) * Math.max(0, height)
}

/** Put the message at the first place where it does not cover the node, or where it covers least of it. */
function place(node) {
  const taken = rectangleOf(node)
  const { offsetWidth: width, offsetHeight: height } = shown
  const boxes = PLACES.map((at) => at(width, height)).map(([left, top]) => ({ left, top, right: left + width, bottom: top + height }))
  const covered = boxes.map((box) => (taken ? common(box, taken) : 0))
  const { left, top } = boxes[covered.indexOf(Math.min(...covered))]
  Object.assign(shown.style, { left: `${left}px`, top: `${top}px` })
}

/** Show one message, in the place of the one before; texts are shown as they are. */
function tell(id, type, sentence) {
  remove()
  shown = document.createElement("div")
  shown.className = "fastar-message"
  shown.setAttribute("role", "alert")
  const title = document.createElement("b")
  title.textContent = (titleOf(id) ?? type).slice(0, LONGEST_TITLE)
  const detail = document.createElement("span")
  detail.textContent = sentence.slice(0, LONGEST)
  shown.append(title, detail)
  shown.addEventListener("click", remove)
  document.body.append(shown)
  place(shownOf(id))
}

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

/** Why the server refused an input: our own reason, or ComfyUI's with the name of the input. */
function reasonOf({ type, message, details, extra_info }) {
  if (type === "custom_validation_failed") return sentenceOf(details)
  if (type === "value_not_in_list") return details
  return `${extra_info?.input_name ?? details}: ${message}`
}

/** The first reason for which a graph was rejected at our nodes, and how many more there are. */
function tellReasons(rejected) {
  const reasons = []
  for (const [id, { class_type, errors }] of Object.entries(rejected ?? {}))
    if (class_type?.startsWith("FastAR")) for (const error of errors ?? []) reasons.push([id, class_type, reasonOf(error)])
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
    const style = document.createElement("style")
    style.textContent = STYLE
    document.head.append(style)
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
  afterConfigureGraph: remove,
})
