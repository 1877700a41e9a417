// The lists x and y of Sweep: the settings of the chosen sampler. A sampler for a cell, in the node's menu. And graphs of earlier versions, in
// which Sweep Grid and Sweep Plot drew it.
//
// Kept because the lists would otherwise hold the fifty settings of all samplers, most of which the chosen one does not have. The server
// takes every setting of the list and names those that the sampler lacks.
// The graphs: ComfyUI's own replacement of nodes puts one node in the place of one, and here two join a third.
import { api } from "../../../scripts/api.js"
import { app } from "../../../scripts/app.js"
import { nodeOf } from "./graphs.js"
import { isOpen } from "./text.js"
import { say } from "./words.js"

const settings = {} // by node, in lower case

/** The settings of a sampler by its name for the command line; "+lazymar" adds LazyMAR's caches. */
function settingsOf(sampler) {
  const [name, cache] = String(sampler).split("+")
  const own = settings[`fastar${name}sampler`] ?? settings[`fastar${name}`] ?? []
  return cache ? [...own, ...(settings.fastarlazymarcache ?? [])] : own
}

// Nodes of earlier versions: the output of Sweep that has their image, and the place of their widget among Sweep's. The server has the same
// for prompts, in nodes/sweep.py.
const EARLIER = { FastARSweepGrid: { output: 0, place: 8 }, FastARSweepPlot: { output: 2, place: 9 } }
const OUTPUTS = [["image", "IMAGE"], ["table", "STRING"], ["plot", "IMAGE"]]

// Links of a graph are arrays, those of a subgraph objects.
const ORIGIN = [1, "origin_id"]
const SLOT = [2, "origin_slot"]
const TARGET = [3, "target_id"]
const keyIn = (link, [place, name]) => (Array.isArray(link) ? place : name)
const get = (link, part) => link[keyIn(link, part)]
const set = (link, part, value) => (link[keyIn(link, part)] = value)
const idOf = (link) => (Array.isArray(link) ? link[0] : link.id)

/** The links from an output of a node with the nodes at their ends, also through the editor's Reroute nodes: [[link, node], ...]. */
function takers(graph, id, slot) {
  const links = graph.links.filter((link) => link && get(link, ORIGIN) === id && get(link, SLOT) === slot)
  const found = links.map((link) => [link, graph.nodes.find((node) => node.id === get(link, TARGET))])
  return found.flatMap(([link, node]) => [[link, node], ...(node?.type === "Reroute" ? takers(graph, node.id, 0) : [])])
}

const remove = (list, entry) => list.splice(list.indexOf(entry), 1)

/** Let what took the image of Sweep Grid or Sweep Plot take it from their Sweep, in a saved graph or subgraph. */
function convert(graph) {
  for (const sweep of graph.nodes.filter(({ type }) => type === "FastARSweep")) {
    if (sweep.outputs?.[0]?.name !== "sweep") continue
    sweep.outputs = OUTPUTS.map(([name, type], slot) => ({ name, type, links: slot === 1 ? (sweep.outputs[1]?.links ?? []) : [] }))

    for (const [given, node] of takers(graph, sweep.id, 0)) {
      remove(graph.links, given)
      const earlier = EARLIER[node?.type]
      if (!earlier) {
        for (const input of node?.inputs ?? []) if (input.link === idOf(given)) input.link = null
        continue
      }

      if (Array.isArray(sweep.widgets_values)) sweep.widgets_values[earlier.place] = node.widgets_values?.[0]
      for (const [link] of takers(graph, node.id, 0).filter(([link]) => get(link, ORIGIN) === node.id)) {
        set(link, ORIGIN, sweep.id)
        set(link, SLOT, earlier.output)
        sweep.outputs[earlier.output].links.push(idOf(link))
      }
      remove(graph.nodes, node)
    }
  }
}

// In the output of the node, and in its properties: a saved graph keeps its menu. See nodes/sweep.py.
const CELLS = "fastar_cells"
// The inputs of Sweep and those of a sampler for the same.
const SAME = [["model", "model"], ["model", "target"], ["draft", "draft"], ["condition", "condition"]]
const APART = 40 // pixels

const inputOf = (node, name) => node.inputs.findIndex((input) => input.name === name)

/** Keep the cells of a sweep that has run. */
function keepCells({ detail }) {
  const node = detail?.output?.[CELLS] && isOpen(detail.prompt_id) && nodeOf(detail.display_node ?? detail.node)
  if (node) node.properties[CELLS] = detail.output[CELLS]
}

/** Put a sampler with the settings of a cell beside its sweep, on the same model and condition. */
function addSampler(sweep, { label, node: type, widgets }) {
  const made = LiteGraph.createNode(type)
  const [x, y] = sweep.pos
  made.pos = [x + sweep.size[0] + APART, y]
  sweep.graph.add(made)
  made.title = `${made.title}, ${label}`

  for (const widget of made.widgets) {
    if (widget.name in widgets) widget.value = widgets[widget.name]
    if (widget.name === "control_after_generate") widget.value = "fixed" // of the seed
  }
  for (const [from, to] of SAME) {
    const link = sweep.graph.getLink(sweep.inputs[inputOf(sweep, from)]?.link)
    const origin = link && sweep.graph.getNodeById(link.origin_id)
    if (inputOf(made, to) >= 0) origin?.connect(link.origin_slot, made, inputOf(made, to))
  }
  app.canvas.select?.(made)
  sweep.graph.setDirtyCanvas?.(true, true)
}

app.registerExtension({
  name: "FastAR.Sweep",
  setup: () => api.addEventListener("executed", keepCells),
  getNodeMenuItems(node) {
    const cells = node.comfyClass === "FastARSweep" ? (node.properties[CELLS] ?? []) : []
    if (!cells.length) return []
    const options = cells.map((cell) => ({ content: cell.label, callback: () => addSampler(node, cell) }))
    return [{ content: say("New sampler with the settings of"), has_submenu: true, submenu: { options } }]
  },
  beforeConfigureGraph(saved) {
    for (const graph of [saved, ...(saved?.definitions?.subgraphs ?? [])]) if (graph?.nodes && graph.links) convert(graph)
  },
  beforeRegisterNodeDef(_, { name, input }) {
    if (name.startsWith("FastAR") && input?.optional?.preset) settings[name.toLowerCase()] = Object.keys(input.optional)
  },
  nodeCreated(node) {
    if (node.comfyClass !== "FastARSweep") return
    const [sampler, ...axes] = ["sampler", "x", "y"].map((name) => node.widgets.find((widget) => widget.name === name))
    const all = axes.map(({ options }) => options.values)
    node.fitAxes = () => {
      const own = settingsOf(sampler.value)
      axes.forEach(({ options }, k) => (options.values = all[k].filter((name) => ["none", "preset", "checkpoint", "label", "prompt", ...own].includes(name))))
    }
    node.fitAxes()
    const chosen = sampler.callback
    sampler.callback = function (...args) {
      chosen?.apply(this, args)
      node.fitAxes()
      for (const axis of axes) if (!axis.options.values.includes(axis.value)) axis.value = axis.options.values[0]
    }
  },
  loadedGraphNode: (node) => node.fitAxes?.(),
})
