// Colours of our socket types, and the nodes that are offered for a link that is dropped on the canvas.
//
// Kept because the editor draws the sockets of packs in one grey, would offer every node that makes a condition, whatever the connected model
// reads, and none for the link of a condition, because it compares the whole text of types.
import { app } from "../../../scripts/app.js"
import { instancesOf, valueOf } from "./graphs.js"
import { loaderOf } from "./models.js"

const COLOURS = {
  FASTAR_MAR: "#8fb8de",
  FASTAR_TOKEN_MODEL: "#7fd1ae",
  FASTAR_BITDANCE: "#e08fa8",
  FASTAR_TAR: "#b8d977",
  FASTAR_LABELS: "#f2b263",
  FASTAR_PROMPT: "#e8d16c",
  FASTAR_IMAGE_PROMPT: "#d98fd0",
  FASTAR_TEXT: "#c9a27a",
  FASTAR_CODES: "#e08d5b",
  FASTAR_CACHE: "#b0b0b0",
  FASTAR_CROP: "#6fb7e9",
  FASTAR_REPORT: "#c9a0dc",
  FASTAR_SWEEP: "#8e9be8",
}
// Nodes that make what the model of a loader reads, the likeliest first.
const MAKERS = {
  FastARLoadMAR: ["FastARClassLabel"],
  FastARLoadHarmon: ["FastARPrompt"],
  FastARLoadJanus: ["FastARPrompt", "FastARImageAndPrompt"],
  FastARLoadTarDetokenizer: ["FastARTarPrompt", "FastARImageToCodes"],
}
// All of them with what they make.
const MADE = {
  FastARClassLabel: "FASTAR_LABELS",
  FastARPrompt: "FASTAR_PROMPT",
  FastARImageAndPrompt: "FASTAR_IMAGE_PROMPT",
  FastARLlamaGenPrompt: "FASTAR_TEXT",
  FastARTarPrompt: "FASTAR_CODES",
  FastARImageToCodes: "FASTAR_CODES",
}
// Samplers by the type of a condition that they take, in the order of the menu.
const takers = {}

/** The nodes that make a condition of one of these types for a sampler. */
function makersFor(sampler, types) {
  const [instance] = instancesOf(sampler)
  const loader = instance && loaderOf(instance)
  const checkpoint = loader && valueOf(loader, "checkpoint")
  const kind = loader?.node.comfyClass

  // A LlamaGen reads labels or texts; the official text models are named t2i.
  if (kind === "FastARLoadLlamaGen") return [/t2i/i.test(checkpoint) ? "FastARLlamaGenPrompt" : "FastARClassLabel"]
  // A BitDance reads labels or prompts; the official models of prompts are named 14b.
  if (kind === "FastARLoadBitDance") return /14b/i.test(checkpoint) ? ["FastARPrompt"] : ["FastARClassLabel", "FastARPrompt"]
  return MAKERS[kind] ?? Object.keys(MADE).filter((maker) => types.split(",").includes(MADE[maker]))
}

/** The node that a pointer is on; a socket of the classic renderer may lie half outside of it. */
function nodeAt(event) {
  const id = event.target?.closest?.("[data-node-id]")?.dataset.nodeId
  if (id !== undefined) return app.canvas.graph.getNodeById(id)
  const [x, y] = app.canvas.convertEventToCanvasOffset(event)
  return app.canvas.graph.getNodeOnPos(x, y) ?? app.canvas.graph.getNodeOnPos(x + 10, y)
}

app.registerExtension({
  name: "FastAR.Sockets",
  addCustomNodeDefs(definitions) {
    for (const [name, { output, input }] of Object.entries(definitions)) {
      const types = String(input?.required?.condition?.[0])
      if (!types.startsWith("FASTAR_") || !output.includes("LATENT")) continue
      for (const type of types.split(",")) (takers[type] ??= []).push(name)
    }
  },
  setup() {
    const style = document.createElement("style") // for Nodes 2.0
    style.textContent = `:root{${Object.entries(COLOURS).map(([type, colour]) => `--color-datatype-${type}:${colour};`).join("")}}`
    document.head.append(style)

    // Before a link is dragged.
    const prepare = (event) => {
      const node = app.canvas.graph && nodeAt(event)
      const types = String(node?.inputs?.find(({ name }) => name === "condition")?.type)
      if (types.startsWith("FASTAR_")) LiteGraph.slot_types_default_in[types] = makersFor(node, types)
      Object.assign(LiteGraph.slot_types_default_out, takers)
    }
    document.addEventListener("pointerdown", prepare, { capture: true })
  },
  afterConfigureGraph() {
    // Not in setup, after which the editor sets the colours of its palette.
    for (const colours of [app.canvas.default_connection_color_byType, LGraphCanvas.link_type_colors]) Object.assign(colours, COLOURS)
  },
})
