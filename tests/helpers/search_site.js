// Searches a built site as its own worker does: node search_site.js SITE QUERY... prints a line for each query: a JSON
// list of its first three answers, each the addresses of one page and its sections.
const fs = require("fs")
const vm = require("vm")

const [site, ...queries] = process.argv.slice(2)
const workers = `${site}/assets/javascripts/workers/`
const [file] = fs.readdirSync(workers).filter((name) => /^search.*\.js$/.test(name))
const scope = {
  addEventListener: (_, handler) => (scope.handler = handler),
  postMessage: (message) => (scope.answer = message),
  console, location: { href: "file:///" }, setTimeout, URL, importScripts: () => {},
}
scope.self = scope.globalThis = scope
vm.createContext(scope)
vm.runInContext(fs.readFileSync(workers + file, "utf8"), scope)
const index = fs.readFileSync(`${site}/search/search_index.js`, "utf8").replace(/^var __index = |;?\s*$/g, "")

async function main() {
  await scope.handler({ data: { type: 0, data: { ...JSON.parse(index), options: { suggest: false } } } })
  for (const query of queries) {
    await scope.handler({ data: { type: 2, data: query } })
    const answers = scope.answer.data.items.slice(0, 3)
    console.log(JSON.stringify(answers.map((answer) => answer.map((part) => part.location))))
  }
}

main()
