// %date:yyyy-MM-dd% and %Node.widget% in the name of a file, as in Save Image.
//
// Kept because the editor replaces them for a list of its own nodes only.
import { app } from "../../../scripts/app.js"
import { applyTextReplacements } from "../../../scripts/utils.js"
import { widgetOf } from "./graphs.js"

app.registerExtension({
  name: "FastAR.FileNames",
  nodeCreated(node) {
    const widget = node.comfyClass?.startsWith("FastAR") && widgetOf(node, "filename_prefix")
    if (widget) widget.serializeValue = () => applyTextReplacements(app, widget.value)
  },
})
