// Widgets that nodes no longer have, in graphs that were saved with them, and widgets that came after a graph was saved.
//
// Kept because the editor gives saved values to widgets by position: what follows such a widget would get its neighbour's value. What a
// removed widget was set to is said, if it is not what always holds now. A widget that came later gets the value that held before.
import { app } from "../../../scripts/app.js"
import { idOf, instances, valueOf } from "./graphs.js"
import { tell } from "./messages.js"
import { fedBy, loaderOf } from "./models.js"
import { say } from "./words.js"

// The block that measures changes, by the depth of the decoder: of the demo's models, and of full-size ones.
const DEMO_BLOCKS = { "demo": 2, "demo-hybrid": 2, "demo-draft": 1 }
const USUAL_BLOCK = 4

// Names and the values that hold now, as in the settings classes; block depends on the model.
const HOLDS = { diffusion_steps_curve: "linear", inner_temperature: 42, head_period: 7, mask_undecoded: true, group: 4, align_lookaheads: false }
// What replaces some of them, in words.
const INSTEAD = { align_lookaheads: () => say("the images of a batch advance independently, in fewer head calls") }
// Of each node, where removed widgets stand in a saved list of values; of several lists, those that were saved last come first.
const REMOVED = {
  FastARMARSampler: [{ 11: "diffusion_steps_curve" }],
  FastARFastHybridSampler: [{ 18: "align_lookaheads" }, { 15: "diffusion_steps_curve", 19: "align_lookaheads" }],
  FastARGtRSampler: [{ 14: "diffusion_steps_curve" }],
  FastARLazyMARSampler: [{ 15: "diffusion_steps_curve", 22: "block", 23: "head_period" }],
  FastARLazyMARCache: [{ 10: "block", 11: "head_period" }],
  FastARCSpDSampler: [{ 14: "inner_temperature" }],
  FastARPARSampler: [{ 10: "group" }],
  FastARZipARSampler: [{ 10: "mask_undecoded" }],
}

// Of each node, where widgets that came later stand today, and the value that held before.
const ADDED = {
  FastARGtRSampler: { 15: "quarters" },
}

/** What was saved of a node, as it would be saved today. */
function convert(node, lists, added, saved) {
  const values = saved.widgets_values
  const widgets = node.widgets.filter(({ serialize }) => serialize !== false)
  if (!Array.isArray(values) || isOfToday(values, widgets)) return saved

  const before = widgets.length - Object.keys(added).length
  const removed = lists.find((list) => values.length === before + Object.keys(list).length)
  if (removed) return withAdded(added, withoutRemoved(node, removed, saved))
  return values.length === before ? withAdded(added, saved) : saved
}

/** Whether saved values fit the widgets of today, by their number and types. */
function isOfToday(values, widgets) {
  return values.length === widgets.length && values.every((value, position) => typeof value === typeof widgets[position].value)
}

/** What was saved, without removed widgets, whose values the node keeps until the graph is complete. */
function withoutRemoved(node, removed, saved) {
  const values = saved.widgets_values
  const names = Object.values(removed)
  node.removedValues = Object.fromEntries(Object.entries(removed).map(([position, name]) => [name, values[position]]))
  const isUnused = ({ name, link }) => names.includes(name) && link == null
  return { ...saved, widgets_values: values.filter((_, position) => !removed[position]), inputs: saved.inputs?.filter((input) => !isUnused(input)) }
}

/** What was saved, with the widgets that came later. */
function withAdded(added, saved) {
  const values = [...saved.widgets_values]
  for (const [position, value] of Object.entries(added)) values.splice(position, 0, value)
  return { ...saved, widgets_values: values }
}

/** The blocks that measure changes in the decoders of the models that an instance samples; all of them, if no model is known. */
function blocksOf(instance) {
  const samplers = instance.node.comfyClass === "FastARLazyMARCache" ? fedBy(instance, "cache") : [instance]
  const loaders = samplers.map(loaderOf).filter(Boolean)
  if (!loaders.length) return [...Object.values(DEMO_BLOCKS), USUAL_BLOCK]
  return loaders.map((loader) => DEMO_BLOCKS[valueOf(loader, "checkpoint")] ?? USUAL_BLOCK)
}

/** What the removed widgets of an instance were set to and is no longer possible, in words. */
function lostBy(instance) {
  const { removedValues = {}, title } = instance.node
  const holds = ([name, value]) => (name === "block" ? blocksOf(instance).includes(value) : value === HOLDS[name])
  const instead = (name) => (INSTEAD[name] ? `; ${INSTEAD[name]()}` : "")
  return Object.entries(removedValues).filter((entry) => !holds(entry)).map(([name, value]) => `${name} ${value} (${title}${instead(name)})`)
}

app.registerExtension({
  name: "FastAR.Removed",
  beforeRegisterNodeDef(nodeType, { name }) {
    if (!REMOVED[name]) return
    const configure = nodeType.prototype.configure
    nodeType.prototype.configure = function (saved, ...rest) {
      return configure.call(this, convert(this, REMOVED[name], ADDED[name] ?? {}, saved), ...rest)
    }
  },
  // After that of messages.js, which takes back what was said about the graph before.
  afterConfigureGraph() {
    const all = instances()
    const lost = all.flatMap(lostBy)
    if (lost.length) {
      const first = all.find((instance) => lostBy(instance).length)
      tell(idOf(first), first.node.title, say("FastAR removed settings, so it does not use these values of the workflow: {n}. The image will differ.", lost.join(", ")))
    }
    for (const { node } of all) delete node.removedValues
  },
})
