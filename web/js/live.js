// The live preview of a sampler in a subgraph, on the subgraph's node, while it runs.
//
// Kept because the classic renderer shows none there, and Nodes 2.0 only those of ComfyUI's own samplers and of nodes that had one when the
// subgraph was made: a template whose samplers are in a subgraph would be grey until its end. The preview goes when the run ends, so the node
// keeps its size and saved graphs do not depend on this file.
import { api } from "../../../scripts/api.js"
import { app } from "../../../scripts/app.js"
import { nodeOf, shownOf, widgetOf } from "./graphs.js"
import { isOpen } from "./text.js"

const NAME = "live preview"
const LEAST = 160 // pixels of its height

const shown = new Map() // the size of a node before it had a preview, by node

/** Whether the editor itself shows the previews of the node with this id in a prompt on the subgraph's node. */
function isExposed(host, id) {
  if (!LiteGraph.vueNodesMode) return false
  const path = String(id).split(":")
  const inner = path[path.indexOf(String(host.id)) + 1]
  return Boolean(host.serialize().properties?.previewExposures?.some(({ sourceNodeId }) => String(sourceNodeId) === inner))
}

function addPreview(host) {
  shown.set(host, [...host.size])
  const element = document.createElement("img")
  element.className = "fastar-live"
  element.alt = NAME
  const widget = host.addDOMWidget(NAME, "fastar_live", element, { serialize: false, getMinHeight: () => LEAST, margin: 4 })
  widget.serialize = false // not among the values of widgets
  return widget
}

function show({ detail: { blob, displayNodeId, jobId } }) {
  const host = shownOf(displayNodeId)
  const isOurs = nodeOf(displayNodeId)?.comfyClass?.startsWith("FastAR")
  if (!isOurs || !host?.subgraph || !isOpen(jobId) || isExposed(host, displayNodeId)) return

  const { element } = widgetOf(host, NAME) ?? addPreview(host)
  URL.revokeObjectURL(element.src)
  element.src = URL.createObjectURL(blob)
  host.setDirtyCanvas(true, true)
}

function removeAll() {
  for (const [host, size] of shown) {
    const widget = widgetOf(host, NAME)
    if (!widget) continue
    URL.revokeObjectURL(widget.element.src)
    host.removeWidget(widget)
    host.setSize(size)
    host.setDirtyCanvas(true, true)
  }
  shown.clear()
}

app.registerExtension({
  name: "FastAR.Live",
  setup() {
    const style = document.createElement("style")
    style.textContent = ".fastar-live { width: 100%; height: 100%; object-fit: contain; }"
    document.head.append(style)

    api.addEventListener("b_preview_with_metadata", show)
    for (const end of ["execution_success", "execution_error", "execution_interrupted"]) api.addEventListener(end, removeAll)
  },
})
