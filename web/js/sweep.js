// The lists x and y of Sweep: the settings of the chosen sampler. And graphs of earlier versions, in which Sweep Grid and Sweep Plot drew it.
//
// Kept because the lists would otherwise hold the fifty settings of all samplers, most of which the chosen one does not have. The server
// takes every setting of the list and names those that the sampler lacks.
// The graphs: ComfyUI's own replacement of nodes puts one node in the place of one, and here two join a third.
import { app } from "../../../scripts/app.js"

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

app.registerExtension({
  name: "FastAR.Sweep",
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
