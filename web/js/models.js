// The loaders behind nodes, as a prompt has them: see behind in graphs.js.
import { behind, instances, isRunning, isSame, valueOf, widgetOf } from "./graphs.js"

// Sockets that lead to the loader of the sampled model.
const MODELS = ["model", "target", "tar"]
// Widgets of a loader that decide what its model is.
export const LOADED = ["checkpoint", "grid", "size", "weights"]

export const isLoader = ({ node }) => node.comfyClass?.startsWith("FastARLoad") && widgetOf(node, "checkpoint") !== undefined

/** The instance behind an input of another one. */
const sourceOf = (instance, names) => behind(instance, instance.node.inputs?.find(({ name }) => names.includes(name)))

/** Whether a model arrives at an instance, whichever it is. */
export const hasModel = (sampler) => Boolean(sourceOf(sampler, MODELS))

/** The loader of the model that an instance samples, if nothing that runs stands between. */
export function loaderOf(sampler) {
  const found = sourceOf(sampler, MODELS)
  return found && isLoader(found) ? found : undefined
}

/** The instances to whose input of that name an instance leads: those that run, or all if none does. */
export function fedBy(instance, name) {
  const found = instances().filter((other) => {
    const source = sourceOf(other, [name])
    return source && isSame(source, instance)
  })
  const running = found.filter(isRunning)
  return running.length ? running : found
}

/** What the server needs to know about a loader: its type, and the values of the widgets that decide what its model is. */
export function described(loader) {
  const inputs = {}
  for (const name of LOADED) if (widgetOf(loader.node, name)) inputs[name] = valueOf(loader, name)
  return { class_type: loader.node.comfyClass, inputs }
}

/** Whether these values are known: none arrives from another node that runs. */
export const isKnown = (loader) => Object.values(described(loader).inputs).every((value) => value !== undefined)
