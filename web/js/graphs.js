// Nodes of a graph by their id in a prompt: in a subgraph it is "id of the subgraph's node:id within", any number of levels deep.
import { app } from "../../../scripts/app.js"

/** The nodes on the way to a node, itself the last; [] if it is not in the graph. */
function pathTo(id) {
  let graph = app.rootGraph ?? app.graph
  const path = []
  for (const part of String(id).split(":")) {
    const node = graph?.getNodeById?.(part) ?? graph?.getNodeById?.(Number(part))
    if (!node) return []
    path.push(node)
    graph = node.subgraph
  }
  return path
}

/** The node, or null. */
export const nodeOf = (id) => pathTo(id).at(-1) ?? null

/** What the screen shows of it: itself, or the node of the subgraph that holds it; null if the screen shows another graph. */
export const shownOf = (id) => pathTo(id).find((node) => node.graph === app.canvas.graph) ?? null

/** Its title, in a subgraph after that one's, or null. */
export const titleOf = (id) => pathTo(id).map((node) => node.title).join(" > ") || null
