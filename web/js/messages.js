// A sentence about a node in a message of our own, one at a time, which stays until a click, the next run, another graph or the MaskEditor.
//
// Kept because the editor's messages cannot be placed: they would cover the node that is to be changed, or the button "View details".
import { api } from "../../../scripts/api.js"
import { app } from "../../../scripts/app.js"
import { shownOf, titleOf } from "./graphs.js"

// Characters that are shown: a title may have any length.
export const LONGEST = 400
const LONGEST_TITLE = 80

const HINT = "fastar-hint" // the class of what is no error, and what the node shows itself in the graph
const REMARK = "fastar-remark" // the class of what is no error, and shown nowhere else

const STYLE = `
.fastar-message { position: fixed; z-index: 3000; width: 380px; padding: 12px 16px; border-radius: 8px; cursor: pointer;
  background: var(--comfy-menu-bg, #353535); color: var(--input-text, #ddd); border: 1px solid var(--error-text, #ff4444);
  font: 13px/1.4 sans-serif; box-shadow: 0 4px 16px #0008; overflow-wrap: anywhere; }
.fastar-message::after { content: "\u00d7"; position: absolute; top: 4px; right: 10px; font-size: 18px; opacity: 0.7; }
.fastar-message b { display: block; margin-bottom: 4px; }
.fastar-message.${HINT}, .fastar-message.${REMARK} { border-color: #e69f00; }`

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

export function remove() {
  shown?.remove()
  shown = null
}

/** Whether the screen shows an App, and no nodes. */
const isApp = () => !app.canvas.canvas.checkVisibility()

/** The node's rectangle on the screen, its title bar included. */
function rectangleOf(node) {
  const { canvas, ds } = app.canvas
  if (!node || isApp()) return null
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
  const places = isApp() ? PLACES.slice(1) : PLACES // an App has the images of earlier runs in the middle
  const boxes = places.map((at) => at(width, height)).map(([left, top]) => ({ left, top, right: left + width, bottom: top + height }))
  const covered = boxes.map((box) => (taken ? common(box, taken) : 0))
  const { left, top } = boxes[covered.indexOf(Math.min(...covered))]
  Object.assign(shown.style, { left: `${left}px`, top: `${top}px` })
}

/** Show one message, in the place of the one before; texts are shown as they are. */
export function tell(id, type, sentence) {
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

/** In an App, tell what the node shows itself in the graph; "" takes it back. */
export function tellInApp(id, type, sentence) {
  if (shown?.classList.contains(HINT)) remove()
  if (!sentence || !isApp()) return
  tell(id, type, sentence)
  shown.classList.add(HINT)
}

/** Tell a remark on a node that runs, which may be one of ComfyUI's. */
function tellRemark({ detail }) {
  tell(String(detail.node), "VAE", detail.text)
  shown.classList.add(REMARK)
}

/** A dialog to change what was told about, over which the message would lie. */
const isMaskEditor = (element) => Boolean(element.querySelector?.("#global-mask-editor"))

app.registerExtension({
  name: "FastAR.Messages",
  init() {
    const style = document.createElement("style")
    style.textContent = STYLE
    document.head.append(style)
    const opened = (changes) => changes.some(({ addedNodes }) => [...addedNodes].some(isMaskEditor))
    new MutationObserver((changes) => opened(changes) && remove()).observe(document.body, { childList: true })
  },
  setup() {
    api.addEventListener("fastar.remark", tellRemark)
    // Back in the graph, the node shows it.
    new ResizeObserver(() => isApp() || tellInApp()).observe(app.canvas.canvas)
  },
  afterConfigureGraph: remove,
})
