// Colours of our socket types, and condition sockets that take what the connected model reads.
//
// Kept because the editor draws the sockets of packs in one grey, suggests no node for a link of several types that is dropped on the
// canvas, and would connect a prompt to a model of class labels. ComfyUI checks prompts by the server's types only.
import { app } from "../../../scripts/app.js"

const COLOURS = {
  FASTAR_MAR: "#8fb8de", FASTAR_TOKEN_MODEL: "#7fd1ae", FASTAR_TAR: "#b8d977", FASTAR_LABEL: "#f2b263", FASTAR_PROMPT: "#f28c63",
  FASTAR_TEXT: "#e6c84f", FASTAR_CODES: "#d98fb8", FASTAR_CACHE: "#b0b0b0", FASTAR_REPORT: "#c9a0dc", FASTAR_SWEEP: "#8e9be8",
}
const MAKERS = {
  FASTAR_LABEL: ["FastARClassLabel"], FASTAR_PROMPT: ["FastARPrompt"], FASTAR_TEXT: ["FastARTextPrompt"],
  FASTAR_CODES: ["FastARTarPrompt", "FastARImageToCodes"],
}
const READS = {
  FastARLoadMAR: "FASTAR_LABEL", FastARLoadHybrid: "FASTAR_PROMPT", FastARLoadJanus: "FASTAR_PROMPT",
  FastARLoadTarDetokenizer: "FASTAR_CODES",
}
const types = {} // of condition sockets, by node

/** The types of a condition for a model, the likeliest first. A LlamaGen reads labels or texts; the official text models are named t2i. */
function readBy(loader) {
  if (loader?.comfyClass !== "FastARLoadLlamaGen") return READS[loader?.comfyClass]
  const text = /t2i/i.test(loader.widgets.find(({ name }) => name === "checkpoint").value)
  return text ? "FASTAR_TEXT,FASTAR_LABEL" : "FASTAR_LABEL,FASTAR_TEXT"
}

function fit(node) {
  if (!(node.comfyClass in types)) return
  const link = node.graph.getLink(node.inputs.find(({ name }) => name === "model" || name === "target").link)
  const read = readBy(link && node.graph.getNodeById(link.origin_id))
  const type = (node.inputs.find(({ name }) => name === "condition").type = read ?? types[node.comfyClass])
  const kinds = read ? [read.split(",")[0]] : type.split(",")
  LiteGraph.slot_types_default_in[type] = kinds.flatMap((kind) => MAKERS[kind])
  app.canvas.default_connection_color_byType[type] = COLOURS[kinds[0]]
}

app.registerExtension({
  name: "FastAR.Sockets",
  beforeRegisterNodeDef(_, { name, input }) {
    const type = input?.required?.condition?.[0]
    if (name.startsWith("FastAR") && type) types[name] = type
  },
  setup() {
    const style = document.createElement("style") // for Nodes 2.0
    style.textContent = `:root{${Object.entries(COLOURS).map(([type, colour]) => `--color-datatype-${type}:${colour};`).join("")}}`
    document.head.append(style)
    // Before a link is dragged.
    document.addEventListener("pointerdown", () => app.canvas.graph?.nodes.forEach(fit), { capture: true })
  },
  afterConfigureGraph() {
    // Not in setup, after which the editor sets the colours of its palette.
    for (const colours of [app.canvas.default_connection_color_byType, LGraphCanvas.link_type_colors]) Object.assign(colours, COLOURS)
    app.graph.nodes.forEach(fit)
  },
})
