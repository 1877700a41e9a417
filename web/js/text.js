// What a node said about its last run: warnings, figures, settings. Read-only text that stays on the node and in the saved graph.
//
// Kept because the editor has no such widget for nodes of packs, and removes the text that a server sends when a run ends.
//
// The text is saved in the node's properties, not among the values of its widgets: those are saved by position, and a widget
// that is added later would take its place. It is not sent in prompts.
import { api } from "../../../scripts/api.js"
import { app } from "../../../scripts/app.js"
import { ComfyWidgets } from "../../../scripts/widgets.js"
import { nodeOf } from "./graphs.js"
import { say } from "./words.js"

const NAME = "last run"
const SAVED = "fastar_text" // the property
const SENT = "fastar_text" // in the output of a node; see nodes/host.py
const SENT_FOR_PROMPTS = "fastar_prompt_texts"
const PROGRESS = "$$node-text-preview" // the editor's own widget for the text of a run that lasts

// Pixels in the classic renderer.
const LINE = 15
const CHARACTER = 5.6
const LEAST = 36
const MOST = 150
// By how much the rows of a node are higher in Nodes 2.0, where the text takes what is left.
const NODES_2 = 90

/** Height of the text at the node's width. */
function heightOf(node, text) {
  const perLine = Math.max(20, (node.size[0] - 50) / CHARACTER)
  let lines = 0
  for (const line of text.split("\n")) lines += Math.max(1, Math.ceil(line.length / perLine))
  return Math.min(MOST, Math.max(LEAST, lines * LINE + 16))
}

function addText(node) {
  const { widget } = ComfyWidgets.STRING(node, NAME, ["STRING", { multiline: true }], app)
  widget.label = say(NAME)
  widget.serialize = false // not among the values of widgets
  widget.options.serialize = false // not in prompts
  widget.options.property = SAVED
  widget.options.read_only = true
  widget.options.getMinHeight = () => heightOf(node, String(widget.value ?? ""))
  widget.options.getMaxHeight = () => MOST
  const area = widget.element ?? widget.inputEl
  if (area) {
    area.readOnly = true
    area.tabIndex = -1
  }
  // A text widget has a socket; nothing can be connected to this one.
  const socket = node.inputs?.findIndex((input) => input.widget?.name === NAME) ?? -1
  if (socket >= 0) node.removeInput(socket)
  fit(node, widget)
}

/** Hide the widget without a text, and make room for it with one. */
function fit(node, widget) {
  const text = String(widget.value ?? "")
  widget.hidden = !text
  widget.options.hidden = !text
  if (!text) return
  const [width, height] = node.computeSize()
  const rows = LiteGraph.vueNodesMode ? NODES_2 : 0
  node.setSize([Math.max(width, node.size[0]), Math.max(height + rows, node.size[1])])
  node.setDirtyCanvas(true, true)
}

const widgetOf = (node) => node?.widgets?.find(({ name }) => name === NAME)

function tell(node, text) {
  const widget = widgetOf(node)
  if (!widget) return
  node.properties[SAVED] = text
  widget.value = text
  const progress = node.widgets.find(({ name }) => name === PROGRESS)
  if (progress) node.removeWidget?.(progress)
  fit(node, widget)
}

const texts = new Set() // types of nodes that show text

// Graphs in other tabs may have nodes of the same ids. Graph by the id of a run, and what was said to graphs that are not open.
const graphs = new Map()
const waiting = new Map()
const MOST_RUNS = 1000 // that are remembered

const openGraph = () => (app.rootGraph ?? app.graph)?.id

function rememberRuns() {
  const queue = api.queuePrompt
  api.queuePrompt = async function (...args) {
    const answer = await queue.apply(this, args)
    graphs.set(answer?.prompt_id, args[1]?.workflow?.id)
    if (graphs.size > MOST_RUNS) graphs.delete(graphs.keys().next().value)
    return answer
  }
}

/** Texts for nodes [[id, text], ...] of the graph of a run, now or when it is opened. */
function tellGraph(run, said) {
  const graph = graphs.get(run) ?? openGraph()
  if (graph === openGraph()) for (const [id, text] of said) tell(nodeOf(id), text)
  else waiting.set(graph, [...(waiting.get(graph) ?? []), ...said])
}

function tellWaiting() {
  const said = waiting.get(openGraph())
  waiting.delete(openGraph())
  for (const [id, text] of said ?? []) tell(nodeOf(id), text)
}

app.registerExtension({
  name: "FastAR.Text",
  beforeRegisterNodeDef(_, { name, input }) {
    // A node that shows text asks for its id.
    if (name.startsWith("FastAR") && input?.hidden?.unique_id) texts.add(name)
  },
  nodeCreated(node) {
    if (texts.has(node.comfyClass)) addText(node)
  },
  loadedGraphNode(node) {
    const widget = widgetOf(node)
    if (!widget) return
    widget.value = node.properties[SAVED] ?? ""
    fit(node, widget)
  },
  // Deferred: the editor has not yet named the graph.
  afterConfigureGraph: () => requestAnimationFrame(tellWaiting),
  setup() {
    api.addEventListener("executed", ({ detail }) => {
      const said = detail?.output?.[SENT]
      if (!said) return
      const own = [detail.display_node ?? detail.node, said.filter(Boolean).join("\n")]
      tellGraph(detail.prompt_id, [own, ...(detail.output[SENT_FOR_PROMPTS] ?? [])])
    })
    rememberRuns()
  },
})
