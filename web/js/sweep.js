// The lists x and y of Sweep: the settings of the chosen sampler.
//
// Kept because the lists would otherwise hold the fifty settings of all samplers, most of which the chosen one does not have. The server
// takes every setting of the list and names those that the sampler lacks.
import { app } from "../../../scripts/app.js"

const settings = {} // by node, in lower case

/** The settings of a sampler by its name for the command line; "+lazymar" adds LazyMAR's caches. */
function settingsOf(sampler) {
  const [name, cache] = String(sampler).split("+")
  const own = settings[`fastar${name}sampler`] ?? settings[`fastar${name}`] ?? []
  return cache ? [...own, ...(settings.fastarlazymarcache ?? [])] : own
}

app.registerExtension({
  name: "FastAR.Sweep",
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
