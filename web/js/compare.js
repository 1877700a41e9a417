// Compare's sockets in the editor: two pairs of image and report, and one free pair after the last connected one.
//
// Only pairs at the end are added and removed. No link moves, so an image is never paired with the report of another one. The server's
// schema has all pairs; prompts do not depend on this file. Preview as Text shows Compare's table as Markdown; the editor does not save
// that choice in a graph.
import { app } from "../../../scripts/app.js"

const PAIRS = 8
const SHOWN = 2
const KINDS = [["image", "IMAGE"], ["report", "FASTAR_REPORT"]]
const OPTIONAL = 7 // LiteGraph's shape of optional inputs

/** Number of the pair that an input belongs to; 0 for a widget's input. */
function pairOf(input) {
  const match = /^(?:image|report)_(\d+)$/.exec(input.name)
  return match ? Number(match[1]) : 0
}

function fitPairs(node) {
  const connected = node.inputs.filter((input) => input.link != null).map(pairOf)
  const wanted = Math.min(PAIRS, Math.max(SHOWN, Math.max(0, ...connected) + 1))
  const before = node.inputs.length
  for (let i = node.inputs.length - 1; i >= 0; i--) if (pairOf(node.inputs[i]) > wanted) node.removeInput(i)
  for (let pair = 1; pair <= wanted; pair++)
    for (const [kind, type] of KINDS) {
      const name = `${kind}_${pair}`
      if (!node.inputs.some((input) => input.name === name)) node.addInput(name, type, { shape: OPTIONAL })
    }
  if (node.inputs.length === before) return
  const [width, height] = node.computeSize()
  node.setSize([Math.max(width, node.size[0]), Math.max(height, node.size[1])])
  node.setDirtyCanvas(true, true)
}

/** Set Preview as Text nodes that show the table of a Compare to Markdown. */
function showTables(graph) {
  for (const node of graph?.nodes ?? []) {
    const link = node.comfyClass === "PreviewAny" && graph.getLink?.(node.inputs[0]?.link)
    const source = link && graph.getNodeById(link.origin_id)
    if (source?.comfyClass !== "FastARCompare" || source.outputs[link.origin_slot].name !== "table") continue
    const mode = node.widgets?.find((widget) => ["preview_mode", "previewMode"].includes(widget.name))
    if (!mode) continue
    mode.value = true
    mode.callback?.(true)
  }
}

app.registerExtension({
  name: "FastAR.Compare",
  nodeCreated(node) {
    if (node.comfyClass !== "FastARCompare") return
    fitPairs(node)
    const changed = node.onConnectionsChange
    node.onConnectionsChange = function (...args) {
      changed?.apply(this, args)
      // Deferred: a link that replaces another one is first removed and then connected.
      requestAnimationFrame(() => {
        if (!this.graph || app.configuringGraph) return
        fitPairs(this)
        showTables(this.graph)
      })
    }
  },
  loadedGraphNode(node) {
    if (node.comfyClass === "FastARCompare") fitPairs(node)
  },
  afterConfigureGraph() {
    showTables(app.graph)
  },
})
