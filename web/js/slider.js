// Core's Image Compare in the classic renderer: two images with a divider that follows the pointer.
//
// Kept because the editor shows them in Nodes 2.0 only; in the classic renderer its node says so and is empty. Graphs without a node of
// ours are left alone.
import { api } from "../../../scripts/api.js"
import { app } from "../../../scripts/app.js"

const LEAST = 220 // height in pixels
const MARGIN = 10
// Names of the two sides: in the value of the widget, and in the output of the node.
const SIDES = { beforeImages: "a_images", afterImages: "b_images" }

const isOurs = (graph) => graph?.nodes.some((node) => node.comfyClass?.startsWith("FastAR"))

/** The address of the first image of a side. Older frontends, such as 1.49, keep it in the widget, newer ones in the node's output. */
function addressOf(widget, side, node) {
  const kept = widget.value?.[side]?.[0]
  if (kept) return kept
  const isInside = node.graph && node.graph !== node.graph.rootGraph
  const output = app.nodeOutputs?.[isInside ? `${node.graph.id}:${node.id}` : node.id]
  const image = output?.[SIDES[side]]?.[0]
  return image && api.apiURL(`/view?${new URLSearchParams(image)}`)
}

/** The first image of a side, once it is loaded; undefined before. */
function loaded(widget, side, node) {
  const url = addressOf(widget, side, node)
  if (!url) return undefined
  const images = (widget.fastarImages ??= {})
  if (images[side]?.url !== url) {
    const image = new Image()
    image.onload = () => node.setDirtyCanvas(true, true)
    image.src = url
    images[side] = { url, image }
  }
  const { image } = images[side]
  return image.complete && image.naturalWidth ? image : undefined
}

/** Draw both images over each other, and the part of the second that is right of the divider. */
function draw(context, node, width, y) {
  const [before, after] = Object.keys(SIDES).map((side) => loaded(this, side, node))
  const first = before ?? after
  if (!first) return

  const room = [width - 2 * MARGIN, (this.computedHeight ?? LEAST) - MARGIN]
  const scale = Math.min(room[0] / first.naturalWidth, room[1] / first.naturalHeight)
  const [w, h] = [first.naturalWidth * scale, first.naturalHeight * scale]
  const left = (width - w) / 2
  // The middle, unless the pointer is on the image.
  const pointer = app.canvas.graph_mouse[0] - node.pos[0] - left
  const isOver = app.canvas.node_over === node && pointer >= 0 && pointer <= w
  const divider = before && after ? (isOver ? pointer : w / 2) : w

  context.save()
  context.imageSmoothingEnabled = true
  context.drawImage(first, left, y, w, h)
  if (before && after) {
    context.beginPath()
    context.rect(left + divider, y, w - divider, h)
    context.clip()
    context.drawImage(after, left, y, w, h)
    context.fillStyle = "#fff"
    context.fillRect(left + divider, y, 1.5, h)
  }
  context.restore()
}

app.registerExtension({
  name: "FastAR.Slider",
  nodeCreated(node) {
    const widget = node.comfyClass === "ImageCompare" && node.widgets?.find(({ type }) => type === "imagecompare")
    if (!widget) return

    const isWanted = () => !LiteGraph.vueNodesMode && isOurs(node.graph)
    Object.defineProperty(widget, "draw", { get: () => (isWanted() ? draw : undefined), set() {}, configurable: true })
    widget.computeLayoutSize = () => ({ minHeight: isWanted() ? LEAST : LiteGraph.NODE_WIDGET_HEIGHT, minWidth: 0 })

    const moved = node.onMouseMove
    node.onMouseMove = function (...args) {
      if (isWanted()) this.setDirtyCanvas(true, false)
      return moved?.apply(this, args)
    }
  },
})
