// Renders the mermaid diagrams of the pages with the copy of mermaid that scripts/docs.sh puts into this directory.
// Without that copy the diagrams stay readable as text. Nothing is loaded from another host.
document.addEventListener("DOMContentLoaded", () => {
  const diagrams = document.querySelectorAll("pre.diagram");
  if (diagrams.length === 0) return;
  const here = document.querySelector('script[src$="assets/diagrams.js"]').src;
  const script = document.createElement("script");
  script.src = new URL("mermaid.min.js", here).href;
  script.onload = async () => {
    const dark = document.body.getAttribute("data-md-color-scheme") === "slate";
    mermaid.initialize({ startOnLoad: false, theme: dark ? "dark" : "neutral" });
    for (const [index, diagram] of diagrams.entries()) {
      const { svg } = await mermaid.render(`diagram-${index}`, diagram.textContent);
      const figure = document.createElement("figure");
      figure.innerHTML = svg;
      diagram.replaceWith(figure);
    }
  };
  document.head.append(script);
});
