// While one types: the words of a prompt that the connected demo reads, and those that it does not know. The negative prompt, where a connected
// model reads one. And the names in the menu of Class Label, those of the connected model.
//
// Kept because a demo knows a few dozen words and draws something else for any other, which one would only see after a run; and because the
// menu would otherwise hold the names of all label sets, most of which the connected model does not know. The server tells both from the
// header of the model's file. An App does not show the prompt's node; there a message names the unknown words, see messages.js. Prompts and
// saved graphs do not depend on this file.
import { api } from "../../../scripts/api.js"
import { app } from "../../../scripts/app.js"
import { idOf, instances, keyOf, valueOf, widgetOf } from "./graphs.js"
import { tellInApp } from "./messages.js"
import { described, fedBy, loaderOf } from "./models.js"
import { say } from "./words.js"

const PROMPTS = ["FastARPrompt", "FastARTarPrompt"]
const LABEL = "FastARClassLabel"
const NAME = "words"
const PAUSE = 250 // milliseconds after the last key
// Known words that are not shown.
const LITTLE = /^(..?|and|the|with|that|some|one)$/i
const LINE = 17 // pixels
const LINES = 4 // that always have room, so the node keeps its size; more are scrolled
const ROOM = LINES * LINE + 4
const MARGIN = 4 // around it in the classic renderer

const STYLE = `
.fastar-words { box-sizing: border-box; min-height: ${ROOM}px; max-height: ${ROOM}px; padding: 2px 8px; overflow: auto;
  font: 12px/${LINE}px sans-serif; color: var(--input-text, #ddd); overflow-wrap: anywhere; }
.fastar-words b { font-weight: normal; opacity: 0.7; }
.fastar-words i { font-style: normal; color: #e69f00; }`

/** The loaders of the models that read a prompt or a label: Tar's own one, and those of the samplers that it feeds. */
function loadersOf(instance) {
  const found = [instance, ...fedBy(instance, "condition")].map(loaderOf).filter(Boolean)
  return [...new Map(found.map((loader) => [keyOf(loader), loader])).values()]
}

/** What the server is asked about an instance. */
function question(instance) {
  return JSON.stringify({
    loaders: loadersOf(instance).map(described),
    text: valueOf(instance, "text") ?? "",
    label_set: valueOf(instance, "label_set"),
  })
}

/** The lines about a prompt: [name, [[word, whether it is unknown], ...]]. */
function linesOf({ reads, strange, subjects }) {
  const plain = (words) => words.map((word) => [word, false])
  const known = reads.filter((word) => !LITTLE.test(word))
  const lines = []
  if (known.length) lines.push([say("reads"), plain(known)])
  if (strange.length) lines.push([say("does not know"), strange.map(([word, meant]) => [meant ? `${word} (${meant}?)` : word, true])])

  // Without a subject the demo draws any of its own.
  const hasSubject = known.some((word) => subjects.includes(word.toLowerCase()))
  if (strange.length && !hasSubject) lines.push([say("draws"), plain(subjects)])
  return lines
}

const textOf = ([name, said]) => `${name}: ${said.map(([word]) => word).join(", ")}`

/** Show the lines in a widget of the prompt, which it has only with lines: Nodes 2.0 does not notice that one is hidden or shown. */
function show(instance, words) {
  const { node } = instance
  const lines = words ? linesOf(words) : []
  const unread = lines.filter(([name]) => name !== say("reads"))
  tellInApp(idOf(instance), node.type, unread.map(textOf).join("; "))

  let widget = widgetOf(node, NAME)
  if (!lines.length) {
    if (widget) node.removeWidget?.(widget)
    node.setDirtyCanvas(true, true)
    return
  }

  widget ??= addLines(node)
  widget.element.replaceChildren(...lines.map(elementOf))
  const [width, height] = node.computeSize()
  node.setSize([Math.max(width, node.size[0]), Math.max(height, node.size[1])])
  node.setDirtyCanvas(true, true)
}

function elementOf([name, words]) {
  const line = document.createElement("div")
  const title = document.createElement("b")
  title.textContent = `${name}: `
  line.append(title)
  words.forEach(([word, isStrange], k) => {
    const part = document.createElement(isStrange ? "i" : "span")
    part.textContent = word
    line.append(...(k ? [", "] : []), part)
  })
  return line
}

function addLines(node) {
  const element = document.createElement("div")
  element.className = "fastar-words"
  element.setAttribute("role", "status")
  const height = () => ROOM + 2 * MARGIN
  const size = { margin: MARGIN, getMinHeight: height, getMaxHeight: height }
  const widget = node.addDOMWidget(NAME, "fastar_words", element, { serialize: false, ...size })
  widget.serialize = false // not among the values of widgets
  return widget
}

const NEGATIVE = "negative"
const NOTHING = ["", "Generate an image."] // of it; the second was the default of earlier versions

/** Show or hide the negative prompt. A text in it stays on the screen: a model that reads none refuses it. */
function offerNegative(node, isRead) {
  const widget = widgetOf(node, NEGATIVE)
  if (!widget) return
  const hidden = !isRead && NOTHING.includes(widget.value)
  if (Boolean(widget.hidden) === hidden) return
  widget.hidden = hidden
  widget.options.hidden = hidden

  // Nodes 2.0 notices a change of the value alone.
  const { value } = widget
  widget.value = `${value} `
  widget.value = value
  node.setDirtyCanvas(true, true)
}

/** The names of the menu of a Class Label; all of them where it is not known which the model knows. */
function list(node, labels) {
  const { options } = widgetOf(node, "add_label")
  node.fastarLabels ??= options.values
  options.values = labels ? [node.fastarLabels[0], ...labels] : node.fastarLabels
}

const answered = new WeakMap() // the last question, by node

async function ask(instance) {
  const { node } = instance
  const asked = question(instance)
  if (answered.get(node) === asked) return
  answered.set(node, asked)

  let answer = {}
  try {
    const response = await api.fetchApi("/fastar/words", { method: "POST", body: asked })
    answer = await response.json()
  } catch (problem) {
    console.warn("FastAR: the words of a prompt are not known", problem)
  }
  if (answered.get(node) !== asked) return
  if (node.comfyClass === LABEL) list(node, answer.labels)
  else {
    show(instance, answer.words)
    offerNegative(node, answer.negative ?? true)
  }
}

const isAsking = ({ node }) => PROMPTS.includes(node.comfyClass) || node.comfyClass === LABEL

let timer = 0

/** Ask about all prompts and labels of the graph, after a pause. */
function askLater() {
  clearTimeout(timer)
  timer = setTimeout(() => instances().filter(isAsking).forEach(ask), PAUSE)
}

app.registerExtension({
  name: "FastAR.Vocabulary",
  nodeCreated(node) {
    if (!isAsking({ node })) return
    const negative = widgetOf(node, NEGATIVE)
    if (negative) negative.label = say("negative prompt")
    askLater()
  },
  afterConfigureGraph: askLater,
  setup() {
    const style = document.createElement("style")
    style.textContent = STYLE
    document.head.append(style)

    document.addEventListener("input", askLater, { capture: true })
    api.addEventListener("graphChanged", askLater)
  },
})
