// Nodes of a workflow with its subgraphs.
//
// A node in a subgraph stands in the workflow once for each node that shows the subgraph. Such an instance is {node, hosts}: the node, and
// the subgraph nodes around it, the innermost first.
import { app } from "../../../scripts/app.js"

// Identifier of the editor: the inputs of a subgraph, as the source of its links.
const SUBGRAPH_INPUT = -10
const DEEPEST = 50 // subgraphs and reroutes on one way

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

/** The instance behind a link, through reroutes and in and out of subgraphs; undefined if there is none. */
export function behind(graph, hosts, linkId, depth = 0) {
  const link = linkId == null ? undefined : graph.getLink(linkId)
  if (!link || depth > DEEPEST) return undefined

  if (isFromOutside(link)) {
    const [host, ...around] = hosts
    return host && behind(host.graph, around, host.inputs?.[link.origin_slot]?.link, depth + 1)
  }

  const node = graph.getNodeById(link.origin_id)
  if (node?.subgraph) {
    const inner = node.subgraph.outputs[link.origin_slot]?.linkIds?.[0]
    return behind(node.subgraph, [node, ...hosts], inner, depth + 1)
  }
  if (node?.type === "Reroute") return behind(graph, hosts, node.inputs?.[0]?.link, depth + 1)
  return node && { node, hosts }
}

/**
 * The widget that holds the value of an instance's widget: its own, or that of a subgraph node to which it was promoted. Undefined if the
 * value arrives over a link from another node, or if there is no such widget.
 */
export function widgetFor({ node, hosts }, name) {
  const socket = node.inputs?.find(({ widget }) => widget?.name === name)
  return widgetAt(node, hosts, socket) ?? (socket?.link == null ? widgetOf(node, name) : undefined)
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
