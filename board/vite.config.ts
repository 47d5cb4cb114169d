import { rename } from "node:fs/promises";
import { resolve } from "node:path";
import { type Plugin, defineConfig } from "vite";
import { viteSingleFile } from "vite-plugin-singlefile";

function named(name: string): Plugin {
  let folder = "";
  return {
    name: "page-name",
    configResolved: (config) => void (folder = config.build.outDir),
    closeBundle: () => rename(resolve(folder, "index.html"), resolve(folder, name)),
  };
}

// One file without links: the gateway serves it, and `millrace board FILE` writes it anywhere.
export default defineConfig({
  plugins: [viteSingleFile(), named("page.html")],
  build: {
    outDir: resolve(import.meta.dirname, "../services/millrace/proxy/board"),
    emptyOutDir: false,
    target: "es2022",
  },
});
