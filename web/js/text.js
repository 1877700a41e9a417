// What a node said about its last run: warnings, figures, settings. Read-only text that stays on the node and in the saved graph.
//
// Kept because the editor has no such widget for nodes of packs, and removes the text that a server sends when a run ends.
//
// The node of a subgraph shows the warnings and figures of the nodes inside: what they show themselves is only seen in the subgraph. Apps
// show only promoted widgets of such a node, not this one.
//
// The text is saved in the node's properties, not among the values of its widgets: those are saved by position, and a widget
// that is added later would take its place. It is not sent in prompts.
import { api } from "../../../scripts/api.js"
import { app } from "../../../scripts/app.js"
import { hostsOf, nodeOf } from "./graphs.js"
import { tellInApp } from "./messages.js"
import { say } from "./words.js"

const NAME = "last run"
const SAVED = "fastar_text" // the property
const SENT = "fastar_text" // in the output of a node; see nodes/host/text.py
const SENT_PARTS = "fastar_text_parts"
const SENT_FOR_PROMPTS = "fastar_prompt_texts"
const PROGRESS = "$$node-text-preview" // the editor's own widget for the text of a run that lasts

// Pixels in the classic renderer.
const LINE = 15
const CHARACTER = 5.6
const CHARACTER_NODES_2 = 6
const LEAST = 36
const MOST = 150
const MOST_ROWS = 8 // of the text area in Nodes 2.0
// By how much the rows of a node are higher in Nodes 2.0, where the text takes what is left.
const NODES_2 = 90

/** Number of lines of the text at the node's width. */
function linesOf(node, text) {
  const width = LiteGraph.vueNodesMode ? (node.size[0] - 72) / CHARACTER_NODES_2 : (node.size[0] - 50) / CHARACTER
  const perLine = Math.max(20, Math.floor(width))
  let lines = 0
  for (const line of text.split("\n")) lines += Math.max(1, Math.ceil(line.length / perLine))
  return lines
}

const heightOf = (node, text) => Math.min(MOST, Math.max(LEAST, linesOf(node, text) * LINE + 16))

function addText(node) {
  const { widget } = app.widgets.STRING(node, NAME, ["STRING", { multiline: true }], app)
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
  // Nodes 2.0 passes it to the text area, which would be two lines high above an image.
  widget.options.rows = Math.min(MOST_ROWS, Math.max(2, linesOf(node, text)))
  const [width, height] = node.computeSize()
  const rows = LiteGraph.vueNodesMode ? NODES_2 : 0
  node.setSize([Math.max(width, node.size[0]), Math.max(height + rows, node.size[1])])
  node.setDirtyCanvas(true, true)
}

const widgetOf = (node) => node?.widgets?.find(({ name }) => name === NAME)

/** Add the widget to the node of a subgraph. In older frontends, such as 1.45, it would lose it. */
function addToSubgraph(node) {
  if (node?.subgraph && "_extraWidgets" in node && !widgetOf(node)) addText(node)
}

function tell(node, text) {
  if (text) addToSubgraph(node)
  const widget = widgetOf(node)
  if (!widget) return
  node.properties[SAVED] = text
  widget.value = text
  const progress = node.widgets.find(({ name }) => name === PROGRESS)
  if (progress) node.removeWidget?.(progress)
  fit(node, widget)
}

// What the nodes of a subgraph said: by the id of the subgraph's node in a prompt, the run, and the parts of each node's text by its id.
const inside = new Map()

/** Whether a prompt shows the words that its model does not know while one types, see vocabulary.js. */
const showsWords = (node) => node?.widgets?.some(({ name }) => name === "words")

const own = new Map() // what the prompts said themselves in their last run, by graph and id

/** Show what a node said, {id, text, warnings, figures}, on the node and on the nodes of the subgraphs around it. */
function tellWithHosts(run, said) {
  const node = nodeOf(said.id)
  if (said.isPrompt) tellOfPrompt(node, said)
  else {
    own.set(`${openGraph()}: ${said.id}`, said.text)
    tell(node, said.text)
  }

  for (const host of hostsOf(said.id)) {
    if (inside.get(host)?.run !== run) inside.set(host, { run, all: new Map() })
    const { all } = inside.get(host)
    all.set(said.isPrompt ? `${said.id}, of its sampler` : said.id, said)
    tell(nodeOf(host), summaryOf([...all.values()]))
  }
}

/** Show on a prompt what its sampler said of it, below what the prompt said itself. */
function tellOfPrompt(node, { id, text }) {
  const said = own.get(`${openGraph()}: ${id}`)
  const below = showsWords(node) ? "" : text
  tell(node, [said, below].filter(Boolean).join("\n"))
  tellInApp(id, node?.type, [said, text].filter(Boolean).join("\n"))
}

/** The warnings of several nodes, then their figures, each with the title of its node. */
function summaryOf(all) {
  const speaking = all.filter(({ warnings, figures }) => warnings.length + figures.length)
  speaking.sort((a, b) => a.id.localeCompare(b.id, undefined, { numeric: true }))
  const isComparison = ({ id }) => nodeOf(id)?.comfyClass === "FastARCompare"
  // A comparison gives the figures of all, with their names.
  const counting = speaking.some(isComparison) ? speaking.filter(isComparison) : speaking
  const named = (said, line) => (isComparison(said) || speaking.length === 1 ? line : `${nodeOf(said.id)?.title}: ${line}`)

  // And it repeats a sampler's warning.
  const warned = speaking.flatMap(({ warnings }) => warnings)
  const isRepeated = (line) => warned.some((other) => other !== line && other.includes(line))

  const lines = []
  for (const said of speaking)
    for (const line of said.warnings) if (!isRepeated(line)) lines.push(named(said, line))
  for (const said of counting)
    for (const line of said.figures) lines.push(named(said, line))
  return lines.join("\n")
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

/** Whether the graph of a run is the one that is open. */
export const isOpen = (run) => (graphs.get(run) ?? openGraph()) === openGraph()

/** Show what nodes of the graph of a run said, now or when it is opened. */
function tellGraph(run, all) {
  if (!isOpen(run)) {
    const graph = graphs.get(run)
    const before = waiting.get(graph) ?? []
    waiting.set(graph, [...before, ...all.map((said) => [run, said])])
    return
  }
  for (const said of all) tellWithHosts(run, said)
}

function tellWaiting() {
  const all = waiting.get(openGraph())
  waiting.delete(openGraph())
  for (const [run, said] of all ?? []) tellWithHosts(run, said)
}

/** What an output of a node says: {id, text, warnings, figures} of the node, and of the prompts that it sampled. */
function saidIn({ display_node, node, output }) {
  const own = { id: String(display_node ?? node), text: output[SENT].filter(Boolean).join("\n"), warnings: [], figures: [] }
  for (const parts of output[SENT_PARTS] ?? []) {
    own.warnings.push(...parts.warnings)
    own.figures.push(...parts.figures)
  }
  const prompts = (output[SENT_FOR_PROMPTS] ?? []).map(([id, text]) => {
    return { id, text, warnings: text ? [text] : [], figures: [], isPrompt: true }
  })
  return [own, ...prompts]
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
    if (node.properties?.[SAVED]) addToSubgraph(node)
    const widget = widgetOf(node)
    if (!widget) return
    widget.value = String(node.properties?.[SAVED] ?? "")
    fit(node, widget)
  },
  // Deferred: the editor has not yet named the graph.
  afterConfigureGraph: () => requestAnimationFrame(tellWaiting),
  setup() {
    api.addEventListener("executed", ({ detail }) => {
      if (detail?.output?.[SENT]) tellGraph(detail.prompt_id, saidIn(detail))
    })
    rememberRuns()
  },
})
