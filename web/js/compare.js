// Compare's sockets in the editor: two pairs of image and report, and one free pair after the last connected one.
//
// Kept because the node would otherwise show sixteen sockets, and its table as plain text. ComfyUI's own growing input moves the later
// links when one is removed, which would pair an image with the report of another one; here only pairs at the end are added and removed.
// The server's schema has all pairs; prompts do not depend on this file.
import { app } from "../../../scripts/app.js"

const PAIRS = 8
const KINDS = [["image", "IMAGE"], ["report", "FASTAR_REPORT"]]
const OPTIONAL = 7 // LiteGraph's shape of optional inputs

const pairOf = (input) => Number(/^(?:image|report)_(\d+)$/.exec(input.name)?.[1] ?? 0)

function fitPairs(node) {
  const connected = node.inputs.filter((input) => input.link != null).map(pairOf)
  const wanted = Math.min(PAIRS, Math.max(2, Math.max(0, ...connected) + 1))
  const before = node.inputs.length
  for (let i = node.inputs.length - 1; i >= 0; i--) if (pairOf(node.inputs[i]) > wanted) node.removeInput(i)
  for (let pair = 1; pair <= wanted; pair++)
    for (const [kind, type] of KINDS)
      if (!node.inputs.some((input) => input.name === `${kind}_${pair}`))
        node.addInput(`${kind}_${pair}`, type, { shape: OPTIONAL })
  if (node.inputs.length === before) return
  const [width, height] = node.computeSize()
  node.setSize([Math.max(width, node.size[0]), Math.max(height, node.size[1])])
  node.setDirtyCanvas(true, true)
}

/** Preview as Text shows a table as Markdown; the editor does not save that choice in a graph. */
function showTables(graph) {
  for (const node of graph?.nodes ?? []) {
    const link = node.comfyClass === "PreviewAny" && graph.getLink?.(node.inputs[0]?.link)
    const source = link && graph.getNodeById(link.origin_id)
    const ours = source?.subgraph || source?.comfyClass?.startsWith("FastAR")
    if (!ours || source.outputs[link.origin_slot].name !== "table") continue
    const mode = node.widgets?.find((widget) => ["preview_mode", "previewMode"].includes(widget.name))
    if (mode) mode.callback?.((mode.value = true))
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
      requestAnimationFrame(() => this.graph && !app.configuringGraph && (fitPairs(this), showTables(this.graph)))
    }
  },
  loadedGraphNode: (node) => node.comfyClass === "FastARCompare" && fitPairs(node),
  afterConfigureGraph: () => showTables(app.graph),
})
