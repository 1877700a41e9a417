// The seed of a new node is fixed: two new samplers have one seed, so that they can be compared.
//
// Kept because a node can only say that its seed has a control, whose first value is the editor's, randomize. A saved graph has its own.
import { app } from "../../../scripts/app.js"
import { widgetOf } from "./graphs.js"

app.registerExtension({
  name: "FastAR.Seeds",
  nodeCreated(node) {
    const control = node.comfyClass?.startsWith("FastAR") && widgetOf(node, "control_after_generate")
    if (control) control.value = "fixed"
  },
})
