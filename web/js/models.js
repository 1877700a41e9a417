// The loaders behind nodes, through reroutes and in and out of subgraphs.
import { behind, instances, isSame, widgetFor, widgetOf } from "./graphs.js"

// Sockets that lead to the loader of the sampled model.
const MODELS = ["model", "target", "tar"]

export const isLoader = ({ node }) => node.comfyClass?.startsWith("FastARLoad") && widgetOf(node, "checkpoint") !== undefined

export const isModelSocket = (name) => MODELS.includes(name)

/** The instance behind an input of another one. */
export function sourceOf({ node, hosts }, names) {
  const input = node.inputs?.find(({ name }) => names.includes(name))
  return input && behind(node.graph, hosts, input.link)
}

/** The loader of the model that an instance samples. */
export function loaderOf(sampler) {
  const found = sourceOf(sampler, MODELS)
  return found && isLoader(found) ? found : undefined
}

/** The instances to whose input of that name an instance leads. */
export function fedBy(instance, name) {
  return instances().filter((other) => {
    const source = sourceOf(other, [name])
    return source && isSame(source, instance)
  })
}

/** What the server needs to know about a loader: its type, and the values of its widgets. */
export function described(loader) {
  const inputs = {}
  for (const { name } of loader.node.widgets ?? []) inputs[name] = widgetFor(loader, name)?.value
  return { class_type: loader.node.comfyClass, inputs }
}
