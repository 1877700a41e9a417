// The templates of this pack in the order of their numbers.
//
// ComfyUI's server lists the files of a pack in the order of the file system, and the gallery keeps that order. Names are all
// that it shows and searches of a pack's templates, beside NAME.jpg.
import { api } from "../../../scripts/api.js"

// The pack's folder, which may have any name.
const FOLDER = decodeURIComponent(import.meta.url.split("/extensions/")[1].split("/")[0])

const list = api.getWorkflowTemplates
api.getWorkflowTemplates = async function (...args) {
  const templates = await list.apply(this, args)
  templates?.[FOLDER]?.sort()
  return templates
}
