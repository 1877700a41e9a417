// A choice in a preset widget fills in the numbers below it, for the model behind the connected loader.
//
// Kept because the numbers on the screen are the numbers of a run, and only the server knows those of a preset for a model. It is asked
// when a preset is chosen, and while one is chosen also when the loader's checkpoint or the link to a loader changes. A number that is
// changed by hand makes the preset custom, which changes nothing else. Opening a graph changes nothing. A run that is queued meanwhile waits
// for the answer. Prompts do not depend on this file: the server fills in what they leave out.
import { api } from "../../../scripts/api.js"
import { app } from "../../../scripts/app.js"

const CUSTOM = "custom"
const CACHE = "FastARLazyMARCache"
// Widgets with a place among the settings that no preset sets.
const FREE = ["enabled", "preset", "images", "parallel", "draft_parallel", "detail"]
const KINDS = ["INT", "FLOAT", "BOOLEAN", "COMBO"]
// Sockets that lead to the loader of the sampled model.
const MODELS = ["model", "target", "tar"]
// The editor's identifier of the inputs of a subgraph, as the source of links; a number or, in newer frontends, a text.
const SUBGRAPH_INPUT = -10

const settings = {} // names of the widgets that a preset sets, by node type
const waiting = new Set() // answers that have not come yet

const ownWidget = (node, name) => node.widgets?.find((widget) => widget.name === name)

/** The subgraph's node and the widget on it that stands for a node's widget; undefined if the widget is not promoted. */
function promoted(node, name) {
  const socket = node.inputs?.find((input) => input.widget?.name === name)
  const link = socket?.link == null ? undefined : node.graph?.getLink(socket.link)
  if (!link || Number(link.origin_id) !== SUBGRAPH_INPUT) return undefined

  const outside = everyNode().find((other) => other.subgraph === node.graph)
  const outer = outside?.inputs[link.origin_slot]?.widget?.name
  return outer === undefined ? undefined : [outside, outer]
}

/** The widget whose value a run takes: the node's own, or the one on the subgraph's node to which it is promoted. */
function widgetOf(node, name) {
  const outer = promoted(node, name)
  return (outer && widgetOf(...outer)) ?? ownWidget(node, name)
}

/** All nodes of the open workflow, those in subgraphs too. */
function everyNode() {
  const graphs = [app.rootGraph ?? app.graph]
  for (const subgraph of graphs[0].subgraphs?.values() ?? []) graphs.push(subgraph)
  return graphs.flatMap((graph) => graph.nodes)
}

/** The node and output behind a link, through reroutes and in and out of subgraphs; undefined if there is none. */
function behind(graph, linkId, depth = 0) {
  const link = linkId == null ? undefined : graph.getLink(linkId)
  if (!link || depth > 50) return undefined

  if (Number(link.origin_id) === SUBGRAPH_INPUT) {
    const outside = everyNode().find((node) => node.subgraph === graph)
    return outside && behind(outside.graph, outside.inputs[link.origin_slot]?.link, depth + 1)
  }

  const node = graph.getNodeById(link.origin_id)
  if (node?.subgraph) return behind(node.subgraph, node.subgraph.outputs[link.origin_slot]?.linkIds[0], depth + 1)
  if (node?.type === "Reroute") return behind(graph, node.inputs[0].link, depth + 1)
  return node
}

const isLoader = (node) => node?.comfyClass?.startsWith("FastARLoad") && ownWidget(node, "checkpoint") !== undefined

/** The loader of the model that a node samples. */
function loaderOf(node) {
  const input = node.inputs.find(({ name }) => MODELS.includes(name))
  const found = input && behind(node.graph, input.link)
  return isLoader(found) ? found : undefined
}

/** The samplers that a LazyMAR Cache feeds. */
const fedBy = (cache) => everyNode().filter((node) => cachesOf(node).includes(cache))

/** The LazyMAR Cache of a sampler, as a list. */
function cachesOf(node) {
  const input = node.inputs?.find(({ name }) => name === "cache")
  const found = input && behind(node.graph, input.link)
  return found?.comfyClass === CACHE ? [found] : []
}

/** What the server needs to know about a node. */
function question(node) {
  const sampler = node.comfyClass === CACHE ? fedBy(node)[0] : node
  const loader = sampler && loaderOf(sampler)
  const inputs = Object.fromEntries((loader?.widgets ?? []).map(({ name }) => [name, widgetOf(loader, name).value]))
  return {
    node: node.comfyClass,
    preset: widgetOf(node, "preset").value,
    loader: loader ? { class_type: loader.comfyClass, inputs } : null,
    steps: node.comfyClass === CACHE ? widgetOf(sampler ?? {}, "steps")?.value : undefined,
  }
}

/** Ask the server for the numbers of a node's preset and show them. */
async function ask(node) {
  const preset = widgetOf(node, "preset")
  const turn = (node.fastarTurn = (node.fastarTurn ?? 0) + 1)
  const asked = question(node)

  let answer
  try {
    const response = await api.fetchApi("/fastar/fill", { method: "POST", body: JSON.stringify(asked) })
    answer = await response.json()
  } catch (problem) {
    answer = { error: `preset: the server did not answer (${problem.message}).` }
  }
  // Another choice, or a number that was changed by hand, came first.
  if (turn !== node.fastarTurn || preset.value !== asked.preset) return

  if (answer.error) {
    preset.value = CUSTOM
    app.extensionManager?.toast?.add({ severity: "warn", summary: node.title, detail: answer.error, life: 8000 })
  } else {
    for (const [name, value] of Object.entries(answer.values))
      for (const widget of [ownWidget(node, name), widgetOf(node, name)]) if (widget) widget.value = value
    preset.label = `preset (${answer.model})`
  }

  node.graph?.setDirtyCanvas(true, true)
  app.extensionManager?.workflow?.activeWorkflow?.changeTracker?.checkState?.()
  cachesOf(node).forEach(fill)
}

/** Fill in the numbers of a node, unless they are custom. */
function fill(node) {
  const preset = widgetOf(node, "preset")
  if (!preset || preset.value === CUSTOM) return
  const answer = ask(node).finally(() => waiting.delete(answer))
  waiting.add(answer)
}

/** Fill in the numbers of a node once the editor has finished changing its links: one that replaces another is removed first. */
function fillLater(node) {
  const later = new Promise(requestAnimationFrame).then(() => {
    if (!node.graph) return
    fill(node)
    cachesOf(node).forEach(fill)
  })
  const done = later.finally(() => waiting.delete(done))
  waiting.add(done)
}

/** Call a function after a widget was changed in the editor, which opening a graph does not do. */
function afterChange(widget, react) {
  const changed = widget.callback
  widget.callback = function (...args) {
    const result = changed?.apply(this, args)
    if (!app.configuringGraph) react()
    return result
  }
}

/** Hide the advanced widgets in the classic renderer too, which has "Show Advanced" in a node's menu but does not read the schema. */
function foldAdvanced(node) {
  for (const widget of node.widgets) {
    if (!widget.options?.advanced) continue
    widget.advanced = true
    // That renderer does not draw them, but leaves room for all that are not hidden.
    const get = () => !LiteGraph.vueNodesMode && !node.showAdvanced
    Object.defineProperty(widget, "hidden", { get, set() {}, configurable: true, enumerable: true })
  }
}

/** What a choice of a node's preset does. */
function presetChosen(node) {
  const preset = widgetOf(node, "preset")
  if (preset.value === CUSTOM) preset.label = undefined
  fill(node)
}

/** What a number that is changed by hand does. */
function numberChanged(node, name) {
  const preset = widgetOf(node, "preset")
  preset.value = CUSTOM
  preset.label = undefined
  if (name === "steps") cachesOf(node).forEach(fill)
}

function watchPreset(node) {
  afterChange(ownWidget(node, "preset"), () => presetChosen(node))
  for (const name of settings[node.comfyClass]) afterChange(ownWidget(node, name), () => numberChanged(node, name))

  const connected = node.onConnectionsChange
  node.onConnectionsChange = function (side, slot, isConnected, link, socket) {
    connected?.apply(this, arguments)
    if (app.configuringGraph || !isConnected) return
    const name = socket?.name
    if ([...MODELS, "cache"].includes(name)) fillLater(this)
  }
}

/** Widgets of a loader on which the numbers depend. */
const DECIDE = ["checkpoint", "grid", "size", "weights"]

/** What another model in a loader does. */
function modelChanged(loader) {
  for (const node of everyNode()) if (settings[node.comfyClass] && isFrom(node, loader)) fill(node)
}

function watchLoader(loader) {
  for (const name of DECIDE) {
    const widget = ownWidget(loader, name)
    if (widget) afterChange(widget, () => modelChanged(loader))
  }
}

const watched = new WeakSet() // widgets of subgraphs' nodes

/** The same for the widgets that a subgraph's node has of the nodes inside it: their callbacks are not those of the nodes inside. */
function watchPromoted() {
  for (const node of everyNode()) {
    const preset = settings[node.comfyClass] ? ["preset", ...settings[node.comfyClass]] : []
    for (const name of isLoader(node) ? DECIDE : preset) {
      const widget = promoted(node, name) && widgetOf(node, name)
      if (!widget || watched.has(widget)) continue
      watched.add(widget)
      afterChange(widget, () => {
        if (isLoader(node)) modelChanged(node)
        else if (name === "preset") presetChosen(node)
        else numberChanged(node, name)
      })
    }
  }
}

/** Whether the numbers of a node depend on a loader. */
function isFrom(node, loader) {
  const samplers = node.comfyClass === CACHE ? fedBy(node) : [node]
  return samplers.some((sampler) => loaderOf(sampler) === loader)
}

app.registerExtension({
  name: "FastAR.Presets",
  init() {
    const toPrompt = app.graphToPrompt
    app.graphToPrompt = async function (...args) {
      watchPromoted() // widgets that were promoted by hand
      while (waiting.size) await Promise.allSettled([...waiting])
      return toPrompt.apply(this, args)
    }
  },
  beforeRegisterNodeDef(_, { name, input }) {
    const own = input?.optional
    if (!name.startsWith("FastAR") || !own?.preset) return
    const isSetting = ([key, [kind]]) => !FREE.includes(key) && (Array.isArray(kind) || KINDS.includes(kind))
    settings[name] = Object.entries(own).filter(isSetting).map(([key]) => key)
  },
  nodeCreated(node) {
    if (settings[node.comfyClass]) {
      foldAdvanced(node)
      watchPreset(node)
    } else if (isLoader(node)) watchLoader(node)
    // A subgraph's node gets its widgets after it was made.
    requestAnimationFrame(watchPromoted)
  },
  afterConfigureGraph: () => requestAnimationFrame(watchPromoted),
})
