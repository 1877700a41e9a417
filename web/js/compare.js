// Sockets of Compare and Time-lapse in the editor: two pairs of image and report, and one free pair after the last connected one. And room for
// the animation on a new Time-lapse, which the editor would show at the size of a thumbnail.
//
// Kept because the nodes would otherwise show eight and sixteen sockets, which leave little room for the animation, and Compare's table as
// plain text. ComfyUI's own growing input moves the later links when one is removed, which would pair an image with the report of another
// one; here only pairs at the end are added and removed. The server's schema has all pairs; prompts do not depend on this file.
import { api } from "../../../scripts/api.js"
import { app } from "../../../scripts/app.js"
import { behind, instances, instancesOf, widgetOf } from "./graphs.js"

// The pairs of each node in the server's schema.
const PAIRS = { FastARCompare: 8, FastARTimeLapse: 4 }
const KINDS = [["image", "IMAGE"], ["report", "FASTAR_REPORT"]]
const ANIMATION = { width: 340, height: 240 } // pixels
const OPTIONAL = 7 // LiteGraph's shape of optional inputs

const pairOf = (input) => Number(/^(?:image|report)_(\d+)$/.exec(input.name)?.[1] ?? 0)

function fitPairs(node) {
  const connected = node.inputs.filter((input) => input.link != null).map(pairOf)
  const wanted = Math.min(PAIRS[node.comfyClass], Math.max(2, Math.max(0, ...connected) + 1))
  const before = node.inputs.length
  // Names in the editor's language; at first the node has all pairs.
  node.fastarLabels ??= Object.fromEntries(node.inputs.map(({ name, localized_name }) => [name, localized_name]))
  for (let i = node.inputs.length - 1; i >= 0; i--) if (pairOf(node.inputs[i]) > wanted) node.removeInput(i)
  for (let pair = 1; pair <= wanted; pair++)
    for (const [kind, type] of KINDS)
      if (!node.inputs.some((input) => input.name === `${kind}_${pair}`))
        node.addInput(`${kind}_${pair}`, type, { shape: OPTIONAL, localized_name: node.fastarLabels[`${kind}_${pair}`] })
  if (node.inputs.length === before) return
  const [width, height] = node.computeSize()
  node.setSize([Math.max(width, node.size[0]), Math.max(height, node.size[1])])
  node.setDirtyCanvas(true, true)
}

/** Markdown tables as columns of plain text: the classic renderer of the editor shows no Markdown in Preview as Text. */
function plain(text) {
  const lines = []
  for (const line of text.split("\n")) {
    const cells = line.startsWith("|") && line.endsWith("|") ? line.slice(1, -1).split("|") : null
    if (!cells) lines.push(line)
    else if (cells.every((cell) => /^-+$/.test(cell))) lines.push(cells.map((cell) => "\u2500".repeat(cell.length)).join("\u2500"))
    else lines.push(cells.join(" "))
  }
  // The server writes what has a meaning in Markdown as character references.
  return lines.join("\n").replace(/&#(\d+);/g, (_, code) => String.fromCodePoint(Number(code)))
}

/** Whether an instance is Preview as Text, to which a table of ours leads. */
function showsTable(instance) {
  const source = instance.node.comfyClass === "PreviewAny" && behind(instance, instance.node.inputs?.[0])
  // A graph that was edited by hand may have links to outputs that do not exist.
  return Boolean(source) && source.node.comfyClass?.startsWith("FastAR") && source.node.outputs?.[source.slot]?.name === "table"
}

/** The nodes Preview as Text of the workflow that show a table of ours, in subgraphs too. */
const tables = () => new Set(instances().filter(showsTable).map(({ node }) => node))

/** In the classic renderer, the text of the tables without Markdown. */
function showPlain() {
  if (LiteGraph.vueNodesMode) return
  for (const node of tables()) {
    const shown = widgetOf(node, "preview_text")
    if (typeof shown?.value === "string" && shown.value.includes("|")) shown.value = plain(shown.value)
  }
}

/** Let Preview as Text show its text as Markdown; the editor does not save that choice in a graph. */
function showMarkdown(node) {
  const mode = widgetOf(node, "preview_mode") ?? widgetOf(node, "previewMode")
  if (mode) mode.callback?.((mode.value = true))
}

/** Call ``then`` after every change of a node's links. */
function onLinks(node, then) {
  const changed = node.onConnectionsChange
  node.onConnectionsChange = function (...args) {
    changed?.apply(this, args)
    // Deferred: a link that replaces another one is first removed and then connected.
    requestAnimationFrame(() => this.graph && !app.configuringGraph && then(this))
  }
}

app.registerExtension({
  name: "FastAR.Compare",
  nodeCreated(node) {
    if (node.comfyClass === "PreviewAny") onLinks(node, () => instancesOf(node).some(showsTable) && showMarkdown(node))
    if (!(node.comfyClass in PAIRS)) return
    fitPairs(node)
    onLinks(node, fitPairs)
    // A node of a saved graph gets its own size afterwards.
    if (node.comfyClass === "FastARTimeLapse") node.setSize([Math.max(ANIMATION.width, node.size[0]), node.size[1] + ANIMATION.height])
  },
  loadedGraphNode: (node) => node.comfyClass in PAIRS && fitPairs(node),
  afterConfigureGraph: () => tables().forEach(showMarkdown),
  // Deferred: the editor writes the text first.
  setup: () => api.addEventListener("executed", () => requestAnimationFrame(showPlain)),
  onNodeOutputsUpdated: () => requestAnimationFrame(showPlain),
})
