// A choice in a preset widget fills in the numbers below it, for the model behind the connected loader.
//
// Kept because the numbers on the screen are the numbers of a run, and only the server knows those of a preset for a model. It is asked
// when a preset is chosen, and while one is chosen also when another model arrives, for whatever reason: another checkpoint or link, a name in
// another pack's Get, a bypassed node. A number that is changed by hand makes the preset custom, which changes nothing else. Opening a graph
// changes nothing. A run that is queued meanwhile waits for the answer.
//
// A prompt has the numbers of a preset only where they are custom: the sampler, which knows the model, fills in what is left out (see
// nodes/sent.py). Which model a node that runs hands on, such as a switch, is not known here; the editor then shows the numbers for a full-size
// model, and the label of the preset says so.
//
// All of this holds in subgraphs too. A widget of a node in a subgraph may be promoted to the subgraph's node, which then has a value of its
// own for it: see graphs.js, which finds the widget that counts.
import { api } from "../../../scripts/api.js"
import { app } from "../../../scripts/app.js"
import { idOf, instances, instancesOf, isSame, keyOf, targetsOf, valueOf, widgetFor, widgetOf } from "./graphs.js"
import { LOADED, described, fedBy, hasModel, isKnown, isLoader, loaderOf } from "./models.js"
import { say } from "./words.js"

const CUSTOM = "custom"
const CACHE = "FastARLazyMARCache"
// Widgets with a place among the settings that no preset sets.
const FREE = ["enabled", "seed", "preset", "images", "first_image", "parallel", "detail"]
const KINDS = ["INT", "FLOAT", "BOOLEAN", "COMBO"]

const settings = {} // names of the widgets that a preset sets, by node type
const waiting = new Set() // answers that have not come yet
const turns = new Map() // number of the last question, by instance
const known = new Map() // what the numbers of an instance were last looked at for
// Names of the numbers that were changed by hand under a preset that cannot become custom, by id in a prompt.
const byHand = new Map()

const hasPreset = ({ node }) => Boolean(settings[node.comfyClass])

/** The sampler with the model of an instance: itself, or the one that a LazyMAR Cache feeds. */
const samplerOf = (instance) => (instance.node.comfyClass === CACHE ? fedBy(instance, "cache")[0] : instance)

/** What the server needs to know about an instance. */
function question(instance) {
  const { comfyClass } = instance.node
  const sampler = samplerOf(instance)
  const loader = sampler && loaderOf(sampler)
  return {
    node: comfyClass,
    preset: valueOf(instance, "preset"),
    loader: loader && isKnown(loader) ? described(loader) : null,
    steps: comfyClass === CACHE && sampler ? valueOf(sampler, "steps") : undefined,
  }
}

/** Ask the server for the numbers of an instance's preset and show them. */
async function ask(instance) {
  const { node } = instance
  const turn = (turns.get(keyOf(instance)) ?? 0) + 1
  turns.set(keyOf(instance), turn)
  const asked = question(instance)

  let answer
  try {
    const response = await api.fetchApi("/fastar/fill", { method: "POST", body: JSON.stringify(asked) })
    answer = await response.json()
  } catch (problem) {
    answer = { error: `preset: the server did not answer (${problem.message}).` }
  }
  // Another choice, or a number that was changed by hand, came first.
  noticePromoted()
  if (turn !== turns.get(keyOf(instance)) || valueOf(instance, "preset") !== asked.preset) return

  if (answer.error) {
    makeCustom(instance)
    app.extensionManager?.toast?.add({ severity: "warn", summary: node.title, detail: answer.error, life: 8000 })
  } else show(instance, answer)

  for (const { graph } of [node, ...instance.hosts]) graph?.setDirtyCanvas(true, true)
  app.extensionManager?.workflow?.activeWorkflow?.changeTracker?.checkState?.()
  // A cache depends on the steps.
  noticeModels()
}

/** Show the numbers of a preset. */
function show(instance, { values, model }) {
  const preset = widgetFor(instance, "preset")
  byHand.delete(idOf(instance))
  for (const [name, value] of Object.entries(values)) {
    const widget = widgetFor(instance, name)
    if (!widget || widget.value === value) continue
    widget.value = value
    for (const other of othersWith(instance, name)) makeCustom(other, preset)
  }
  rememberPromoted()
  nameModel(instance, model)
}

const firstLabels = new WeakMap() // of preset widgets: in the editor's language, or undefined

/** Show in the label of a preset for which model its numbers are; without a model the label is what it was at first. */
function nameModel(instance, model) {
  const preset = widgetFor(instance, "preset")
  // The label of a promoted widget is the user's, and saved.
  if (!preset || preset !== widgetOf(instance.node, "preset")) return
  const first = firstLabels.get(preset)
  preset.label = model ? `${first ?? preset.name} (${wordsOf(model)})` : first
}

/** The words for a model, such as "demo MAR" or "full-size model", in the editor's language. */
function wordsOf(model) {
  const [size, ...family] = model.split(" ")
  const name = family.join(" ")
  if (size === "demo") return say("demo {n}", name)
  return name === "model" ? say("full-size model") : say("full-size {n}", name)
}

/** The other instances of a node for which the same widget holds a value: the widgets inside of a subgraph are shared. */
function othersWith(instance, name) {
  const widget = widgetFor(instance, name)
  return instancesOf(instance.node).filter((other) => !isSame(other, instance) && widgetFor(other, name) === widget)
}

/** Make the preset of an instance custom: its numbers are no longer those of the preset. */
function makeCustom(instance, except) {
  const preset = widgetFor(instance, "preset")
  if (!preset || preset === except) return
  preset.value = CUSTOM
  rememberPromoted()
  nameModel(instance, "")
  instance.node.graph?.setDirtyCanvas(true, true)
}

/** Let a run wait for what is under way. */
function waitFor(work) {
  const done = work.finally(() => waiting.delete(done))
  waiting.add(done)
}

/** Fill in the numbers of an instance, unless they are custom. */
function fill(instance) {
  remember(instance)
  const preset = valueOf(instance, "preset")
  if (preset === undefined || preset === CUSTOM) return

  // The server refuses a run with a preset that the menu does not have.
  const menu = widgetFor(instance, "preset")?.options?.values
  if (!Array.isArray(menu) || menu.includes(preset)) waitFor(ask(instance))
}

const remember = (instance) => known.set(keyOf(instance), JSON.stringify(question(instance)))

function rememberModels() {
  known.clear()
  instances().filter(hasPreset).forEach(remember)
}

/** Fill in the numbers of the instances to which another model arrives than when they were last looked at. */
function noticeModels() {
  if (app.configuringGraph) return
  for (const instance of instances()) {
    if (!hasPreset(instance)) continue
    const sampler = samplerOf(instance)
    // Without any model the numbers stay: a link may just be about to be replaced.
    if (!sampler || !hasModel(sampler)) continue
    if (known.get(keyOf(instance)) !== JSON.stringify(question(instance))) fill(instance)
  }
}

/** React to a change by hand of the widget of an instance. */
function changed(instance, name) {
  if (isLoader(instance)) noticeModels()
  else if (hasPreset(instance)) {
    if (name === "preset") {
      if (valueOf(instance, "preset") === CUSTOM) nameModel(instance, "")
      // Core's Primitive calls at every run what it is connected to.
      if (widgetFor(instance, "preset")) fill(instance)
      else noticeModels()
    } else if (settings[instance.node.comfyClass].includes(name)) {
      if (widgetFor(instance, "preset")) makeCustom(instance)
      else keep(instance, name)
      noticeModels()
    }
  }
}

/** Send a number that was changed by hand beside a preset that core's Primitive sets: it counts instead of the preset's. */
function keep(instance, name) {
  const id = idOf(instance)
  byHand.set(id, new Set(byHand.get(id)).add(name))
}

/** Call a function after a widget was changed in the editor, which opening a graph does not do. */
function afterChange(widget, react) {
  const before = widget.callback
  widget.callback = function (...args) {
    const result = before?.apply(this, args)
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
    const get = () => !LiteGraph.vueNodesMode && !node.showAdvanced && widget.advanced
    Object.defineProperty(widget, "hidden", { get, set() {}, configurable: true, enumerable: true })
  }
}

/** Watch the widgets of a node, and its links. */
function watch(node, names) {
  for (const name of names) {
    const widget = widgetOf(node, name)
    if (widget) afterChange(widget, () => instancesOf(node).forEach((instance) => changed(instance, name)))
  }
}

function watchLinks(node) {
  const before = node.onConnectionsChange
  node.onConnectionsChange = function () {
    before?.apply(this, arguments)
    // Deferred: a link that replaces another one is first removed and then connected.
    if (!app.configuringGraph) waitFor(new Promise(requestAnimationFrame).then(noticeModels))
  }
}

// The values of the widgets that were promoted to subgraphs' nodes, when they were last looked at. The editor changes them in several ways,
// not all of which call the widget: its side panel does not, and it makes the widgets of a subgraph's node again at times.
const promoted = new Map()

/** The widgets that were promoted to subgraphs' nodes: [[key, value, subgraph's node as an instance, slot], ...]. */
function promotedValues() {
  const found = []
  for (const instance of instances()) {
    if (!instance.node.subgraph) continue
    instance.node.inputs?.forEach((input, slot) => {
      const widget = instance.node.getWidgetFromSlot?.(input)
      if (widget) found.push([`${keyOf(instance)}: ${input.name}`, widget.value, instance, slot])
    })
  }
  return found
}

function rememberPromoted() {
  promoted.clear()
  for (const [key, value] of promotedValues()) promoted.set(key, value)
}

/** React to the promoted widgets that were changed since they were last looked at. */
function noticePromoted() {
  const before = new Map(promoted)
  rememberPromoted()
  if (app.configuringGraph) return
  for (const [key, value, instance, slot] of promotedValues()) {
    if (!before.has(key) || before.get(key) === value) continue
    for (const [target, { widget }] of targetsOf(instance, slot)) if (widget) changed(target, widget.name)
  }
}

/** React to what was changed in the graph since it was last looked at. */
function notice() {
  noticePromoted()
  noticeModels()
}

const watched = new WeakSet() // widgets of subgraphs' nodes

function watchPromoted(host) {
  for (const [slot, input] of (host.inputs ?? []).entries()) {
    const widget = host.getWidgetFromSlot?.(input)
    if (!widget) continue
    if (widget.options?.advanced && isOurs(host, slot)) unfold(widget)
    if (watched.has(widget)) continue
    watched.add(widget)
    afterChange(widget, noticePromoted)
  }
}

/** Whether an input of a subgraph's node leads to a node of ours. */
const isOurs = (host, slot) => targetsOf({ node: host, hosts: [] }, slot).some(([{ node }]) => node.comfyClass?.startsWith("FastAR"))

/** Show a promoted widget that is advanced inside: Nodes 2.0 hides it on a subgraph's node, which has no button that shows it. */
function unfold(widget) {
  widget.options.advanced = false
  widget.advanced = false
}

/** Show the widgets that the graph's App offers: of an advanced one the App shows the name and no control. */
function unfoldForApp() {
  const offered = app.graph.extra?.linearData?.inputs
  for (const input of Array.isArray(offered) ? offered : []) {
    const [id, name] = Array.isArray(input) ? input : []
    const node = app.graph.getNodeById(id)
    const widget = node?.comfyClass?.startsWith("FastAR") && widgetOf(node, name)
    if (widget?.options?.advanced) unfold(widget)
  }
}

function watchHost(host) {
  watchLinks(host)
  const before = host.onWidgetChanged
  host.onWidgetChanged = function (...args) {
    before?.apply(this, args)
    noticePromoted()
  }
  // Deferred: a node that is pasted gets its values after its widgets.
  const look = () => {
    watchPromoted(host)
    requestAnimationFrame(noticePromoted)
  }
  host.subgraph.events?.addEventListener("widget-promoted", look)
  look()
}

/** Leave out of a prompt the numbers that a preset sets. In an exported graph another preset is then enough, and a number that is added counts. */
function leaveOut(prompt) {
  for (const [id, { class_type, inputs }] of Object.entries(prompt)) {
    if (typeof inputs.preset !== "string" || inputs.preset === CUSTOM) continue
    for (const name of settings[class_type] ?? []) {
      if (!Array.isArray(inputs[name]) && !byHand.get(id)?.has(name)) delete inputs[name]
    }
  }
}

app.registerExtension({
  name: "FastAR.Presets",
  init() {
    const toPrompt = app.graphToPrompt
    app.graphToPrompt = async function (...args) {
      notice()
      while (waiting.size) await Promise.allSettled([...waiting])
      const made = await toPrompt.apply(this, args)
      leaveOut(made.output)
      return made
    }
  },
  beforeRegisterNodeDef(_, { name, input }) {
    const own = input?.optional
    if (!name.startsWith("FastAR") || !own?.preset) return
    const isSetting = ([key, [kind]]) => !FREE.includes(key) && (Array.isArray(kind) || KINDS.includes(kind))
    settings[name] = Object.entries(own).filter(isSetting).map(([key]) => key)
  },
  nodeCreated(node) {
    if (node.subgraph) watchHost(node)
    else if (settings[node.comfyClass]) {
      foldAdvanced(node)
      const preset = widgetOf(node, "preset")
      firstLabels.set(preset, preset.label)
      watch(node, ["preset", ...settings[node.comfyClass]])
      watchLinks(node)
    } else if (isLoader({ node })) watch(node, LOADED)
  },
  afterConfigureGraph() {
    for (const { node } of instances()) if (node.subgraph) watchPromoted(node)
    unfoldForApp()
    rememberPromoted()
    rememberModels()
  },
  setup: () => api.addEventListener("graphChanged", notice),
})
