// A Load Image without a file, as template 05 has it for your own image, left out of prompts in which a switch takes the other side.
//
// Kept because ComfyUI reads the file of every Load Image of a prompt, of one that does not run too, and complains in its log that the empty
// name is a folder; and because a graph that is exported as a script runs all nodes.
import { app } from "../../../scripts/app.js"

const SWITCH = "ComfySwitchNode"

/** The inputs of a prompt to which a node leads: [[node, name of the input], ...]. */
function takersOf(prompt, id) {
  const isLink = (value) => Array.isArray(value) && value[0] === id
  return Object.values(prompt).flatMap((node) => Object.keys(node.inputs).filter((name) => isLink(node.inputs[name])).map((name) => [node, name]))
}

/** The side that a switch takes; undefined of other nodes, and of a switch that something else sets. */
function sideOf({ class_type, inputs }) {
  if (class_type !== SWITCH || typeof inputs.switch !== "boolean") return undefined
  return inputs.switch ? "on_true" : "on_false"
}

/** Leave out the images that nobody chose: a switch gets the side that it takes in place of the other, which it needs too. */
function leaveOut(prompt) {
  for (const [id, { class_type, inputs }] of Object.entries(prompt)) {
    if (class_type !== "LoadImage" || inputs.image !== "") continue
    const takers = takersOf(prompt, id)
    if (!takers.every(([node, name]) => sideOf(node) && sideOf(node) !== name)) continue
    for (const [node, name] of takers) node.inputs[name] = node.inputs[sideOf(node)]
    delete prompt[id]
  }
}

const hasOurs = (prompt) => Object.values(prompt).some(({ class_type }) => class_type?.startsWith("FastAR"))

app.registerExtension({
  name: "FastAR.Unused",
  init() {
    const toPrompt = app.graphToPrompt
    app.graphToPrompt = async function (...args) {
      const made = await toPrompt.apply(this, args)
      if (hasOurs(made.output)) leaveOut(made.output)
      return made
    }
  },
})
