// Nodes of a workflow with its subgraphs.
//
// A node in a subgraph stands in the workflow once for each node that shows the subgraph. Such an instance is {node, hosts}: the node, and
// the subgraph nodes around it, the innermost first.
import { app } from "../../../scripts/app.js"

// Identifier of the editor: the inputs of a subgraph, as the source of its links.
const SUBGRAPH_INPUT = -10
const DEEPEST = 50 // nodes and subgraphs on one way
const MUTED = 2 // modes of nodes
const BYPASSED = 4

const rootGraph = () => app.rootGraph ?? app.graph

/** The nodes on the way to a node, itself the last, by its id in a prompt: "id of the subgraph's node:id within"; [] if there is none. */
function pathTo(id) {
  let graph = rootGraph()
  const path = []
  for (const part of String(id).split(":")) {
    const node = graph?.getNodeById?.(part) ?? graph?.getNodeById?.(Number(part))
    if (!node) return []
    path.push(node)
    graph = node.subgraph
  }
  return path
}

/** The node of an id in a prompt, or null. */
export const nodeOf = (id) => pathTo(id).at(-1) ?? null

/** What the screen shows of it: itself, or the node of the subgraph that holds it; null if the screen shows another graph. */
export const shownOf = (id) => pathTo(id).find((node) => node.graph === app.canvas.graph) ?? null

/** The ids in a prompt of the nodes of the subgraphs around it, the innermost first. */
export function hostsOf(id) {
  const parts = String(id).split(":")
  const hosts = []
  while (parts.length > 1) {
    parts.pop()
    hosts.push(parts.join(":"))
  }
  return hosts
}

/** Its title, in a subgraph after that one's, or null. */
export const titleOf = (id) => pathTo(id).map((node) => node.title).join(" > ") || null

export const widgetOf = (node, name) => node?.widgets?.find((widget) => widget.name === name)

/** All nodes of the workflow as instances. */
export function instances(graph = rootGraph(), hosts = []) {
  if (hosts.length > DEEPEST) return []
  const found = []
  for (const node of graph?.nodes ?? []) {
    found.push({ node, hosts })
    if (node.subgraph) found.push(...instances(node.subgraph, [node, ...hosts]))
  }
  return found
}

export const instancesOf = (node) => instances().filter((instance) => instance.node === node)

export const isSame = (a, b) => keyOf(a) === keyOf(b)

/** A text that tells instances apart. */
export const keyOf = ({ node, hosts }) => [node, ...hosts].map(({ id }) => id).join(" in ")

/** Its id in a prompt. */
export const idOf = ({ node, hosts }) => [node, ...hosts].map(({ id }) => id).reverse().join(":")

const isFromOutside = (link) => Number(link.origin_id) === SUBGRAPH_INPUT

/** Whether an instance runs: neither it nor a subgraph around it is muted or bypassed. */
export const isRunning = ({ node, hosts }) => [node, ...hosts].every(({ mode }) => mode !== MUTED && mode !== BYPASSED)

/**
 * The instance that makes the value of an input in a prompt, with the number of the output, ``slot``, as the editor finds it: in and out
 * of subgraphs, past bypassed nodes, and through the nodes that only the editor has, such as Reroute and other packs' Set and Get. Undefined
 * if nothing arrives.
 */
export function behind({ node, hosts }, input, type = input?.type, depth = 0) {
  const link = input?.link == null ? undefined : node.graph.getLink(input.link)
  return link && origin(node.graph, hosts, link, type, depth)
}

/** The instance that makes what a link of a graph carries. */
function origin(graph, hosts, link, type, depth) {
  if (depth > DEEPEST) return undefined // a circle

  if (isFromOutside(link)) {
    const [host, ...around] = hosts
    return host && behind({ node: host, hosts: around }, host.inputs?.[link.origin_slot], undefined, depth + 1)
  }

  const node = graph.getNodeById(link.origin_id)
  return node ? maker({ node, hosts }, link.origin_slot, type, depth) : undefined
}

/** The instance that makes an output of an instance: itself, unless the editor looks through it. */
function maker(instance, slot, type, depth) {
  const { node, hosts } = instance
  if (node.mode === MUTED) return undefined
  if (node.mode === BYPASSED) return behind(instance, node.inputs?.[bypassOf(node, slot, type)], undefined, depth + 1)

  if (node.subgraph) {
    const inner = node.subgraph.outputs[slot]?.linkIds?.[0]
    const link = inner == null ? undefined : node.subgraph.getLink(inner)
    return link && origin(node.subgraph, [node, ...hosts], link, type, depth + 1)
  }

  if (!node.isVirtualNode) return { ...instance, slot }
  const { elsewhere, link } = shownBy(node, slot)
  if (elsewhere) {
    const found = instances().find((other) => other.node === elsewhere.node)
    return found && maker(found, elsewhere.slot, type, depth + 1)
  }
  return link ? origin(node.graph, hosts, link, type, depth + 1) : undefined
}

/** From where a virtual node says that it takes an output: {elsewhere: {node, slot}} of another graph, or {link} of its own. */
function shownBy(node, slot) {
  // The Get of KJNodes complains on the screen when it is asked without its Set.
  if (node.findSetter && !node.findSetter(node.graph)) return {}
  try {
    const elsewhere = node.resolveVirtualOutput?.(slot)
    return elsewhere ? { elsewhere } : { link: node.getInputLink(slot) }
  } catch {
    return {} // what another pack raises stops the editor's prompt, not our nodes
  }
}

/** The number of the input that a bypassed node hands on as an output to an input of a type, by the editor's rule. */
function bypassOf({ inputs, outputs }, slot, type) {
  if (type === "*" || type === "") return inputs.length > slot ? slot : 0
  const fits = (one, other) => LiteGraph.isValidConnection(one, other)
  const beside = inputs[slot]
  if (beside && fits(beside.type, outputs[slot].type) && fits(beside.type, type)) return slot
  const same = inputs.findIndex((input) => input.type === type)
  return same === -1 ? inputs.findIndex((input) => fits(input.type, type)) : same
}

/**
 * The widget that holds the value of an instance's widget: its own, or that of a subgraph node to which it was promoted. Undefined if the
 * value arrives over a link from another node, or if there is no such widget.
 */
export function widgetFor({ node, hosts }, name) {
  const socket = node.inputs?.find(({ widget }) => widget?.name === name)
  return widgetAt(node, hosts, socket) ?? (socket?.link == null ? widgetOf(node, name) : undefined)
}

/** The value of an instance's widget in a prompt; undefined if it arrives from another node that runs. */
export function valueOf(instance, name) {
  const socket = instance.node.inputs?.find(({ widget }) => widget?.name === name)
  const widget = widgetFor(instance, name)
  // Core's Primitive writes its value into the widget itself.
  return (widget ?? (behind(instance, socket) ? undefined : widgetOf(instance.node, name)))?.value
}

function widgetAt(node, hosts, socket) {
  const link = socket?.link == null ? undefined : node.graph.getLink(socket.link)
  if (!link || !isFromOutside(link) || !hosts.length) return undefined
  const [host, ...around] = hosts
  const outer = host.inputs?.[link.origin_slot]
  if (!outer) return undefined
  return outer.link == null ? host.getWidgetFromSlot?.(outer) : widgetAt(host, around, outer)
}

/** The instances with their inputs to which the input of a subgraph node leads: [[instance, input], ...]. */
export function targetsOf({ node: host, hosts }, slot) {
  const inner = [host, ...hosts]
  const found = []
  for (const linkId of host.subgraph.inputs[slot]?.linkIds ?? []) {
    const link = host.subgraph.getLink(linkId)
    const node = link && host.subgraph.getNodeById(link.target_id)
    if (!node) continue
    const input = node.inputs?.[link.target_slot]
    if (node.subgraph) found.push(...targetsOf({ node, hosts: inner }, link.target_slot))
    else if (input) found.push([{ node, hosts: inner }, input])
  }
  return found
}
