// Colours of our socket types, and the nodes that are offered for a link that is dropped on the canvas.
//
// Kept because the editor draws the sockets of packs in one grey, and because of what it offers. Its search box sorts nodes that fit equally by
// the lengths of their names, so the Advisor comes before every sampler, and Tar Prompt before Class Label, whatever the connected model reads.
// Its menu, which those have who installed ComfyUI before frontend 1.24, compares the whole text of types, and has none for a condition.
import { app } from "../../../scripts/app.js"
import { instances, instancesOf, valueOf } from "./graphs.js"
import { isLoader, loaderOf } from "./models.js"

const COLOURS = {
  FASTAR_MAR: "#8fb8de",
  FASTAR_TOKEN_MODEL: "#7fd1ae",
  FASTAR_BITDANCE: "#e08fa8",
  FASTAR_TAR: "#b8d977",
  FASTAR_LATENT_SAMPLERS: "#9fd6d2",
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
// The unaccelerated sampler of the model of a loader.
const SAMPLERS = {
  FastARLoadMAR: "FastARMARSampler",
  FastARLoadHarmon: "FastARMARSampler",
  FastARLoadLlamaGen: "FastARLlamaGenSampler",
  FastARLoadJanus: "FastARLlamaGenSampler",
  FastARLoadTarDetokenizer: "FastARLlamaGenSampler",
  FastARLoadBitDance: "FastARBitDanceSampler",
}
const LOADERS = ["FastARLoadMAR", "FastARLoadLlamaGen", "FastARLoadBitDance"]
const USUAL = [...LOADERS, ...new Set(Object.values(SAMPLERS))]
// For who knows the samplers.
const LATE = ["FastARAnySampler", "FastARSweep", "FastARAdvisor"]
const BEFORE_ALL = 1e9 // a rank above every node of ComfyUI, which have numbers of uses

let dragged = null // what is offered first for the node at which the pointer went down; null for a node of others

/** The place of a node among those that fit equally well, the lowest first; ``usual`` is the editor's. */
function rankOf(name, usual) {
  if (!dragged) return usual
  if (LATE.includes(name)) return 1 + LATE.indexOf(name)
  const place = dragged.indexOf(name)
  return place < 0 ? usual : place - BEFORE_ALL
}

/** The sampler for the model of a loader. */
function samplerFor(loader) {
  // A PAR is a LlamaGen that was trained for another sampler; the files of both have the same loader.
  const isPAR = loader.node.comfyClass === "FastARLoadLlamaGen" && /par-/i.test(`${valueOf(loader, "checkpoint")}-`)
  return isPAR ? "FastARPARSampler" : SAMPLERS[loader.node.comfyClass]
}

/** What is offered first for the links of a node of ours. */
function offersOf(node) {
  const [instance] = instancesOf(node)
  const types = conditionOf(node)
  const makers = types ? makersFor(node, types) : []
  // A sampler reads latents too, but those of another one are for VAE Decode.
  if (node.outputs?.some(({ type }) => type === "LATENT")) return [...makers, ...LOADERS, "FastARCompare"]
  const sampler = instance && isLoader(instance) ? [samplerFor(instance)] : instances().filter(isLoader).map(samplerFor)
  return [...makers, ...sampler, ...USUAL]
}

/** The types of condition that a node takes; "" if it takes none. */
function conditionOf(node) {
  const types = String(node?.inputs?.find(({ name }) => name === "condition")?.type)
  return types.startsWith("FASTAR_") ? types : ""
}

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
    for (const [name, definition] of Object.entries(definitions)) {
      const { output, input } = definition
      // The editor copies it to its own record of the node. Its scores: how well the text fits, uses, lengths.
      if (name.startsWith("FastAR")) definition.postProcessSearchScores = ([fit, ...rest]) => [fit, rankOf(name, 0), ...rest]
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
      const types = conditionOf(node)
      dragged = node?.comfyClass?.startsWith("FastAR") ? offersOf(node) : null
      if (types) LiteGraph.slot_types_default_in[types] = makersFor(node, types)
      Object.assign(LiteGraph.slot_types_default_out, takers)
    }
    document.addEventListener("pointerdown", prepare, { capture: true })
  },
  afterConfigureGraph() {
    // Not in setup, after which the editor sets the colours of its palette.
    for (const colours of [app.canvas.default_connection_color_byType, LGraphCanvas.link_type_colors]) Object.assign(colours, COLOURS)
  },
})
