// Names above the text boxes of our nodes in the classic renderer.
//
// Kept because that renderer draws a text box without its name, so that of two in a node one cannot know which is the prompt. Nodes 2.0 shows
// the names itself.
import { app } from "../../../scripts/app.js"

const MARGIN = 14 // pixels around a text box, in which the name stands; the editor's own has 10
const FONT = 11

/** Draw the name of a text box above it. */
function drawName(widget, ctx, y) {
  ctx.save()
  ctx.font = `${FONT}px ${LiteGraph.NODE_FONT}`
  ctx.fillStyle = LiteGraph.WIDGET_SECONDARY_TEXT_COLOR
  ctx.textAlign = "left"
  ctx.fillText(widget.label ?? widget.name, MARGIN, y + MARGIN - 3)
  ctx.restore()
}

function nameIt(widget) {
  widget.options.margin = MARGIN
  const { draw } = widget
  widget.draw = function (ctx, node, width, y, height, isFarAway) {
    draw?.apply(this, arguments)
    if (!isFarAway) drawName(this, ctx, y)
  }
}

const isTextBox = ({ element }) => element?.tagName === "TEXTAREA" && !element.readOnly

app.registerExtension({
  name: "FastAR.Labels",
  nodeCreated(node) {
    if (node.comfyClass?.startsWith("FastAR")) node.widgets?.filter(isTextBox).forEach(nameIt)
  },
})
