// Making nodes of a document, and changing those that are there as little as possible.
// Nothing here ever parses text as HTML.

const SVG = "http://www.w3.org/2000/svg";

export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function shape(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// Have `parent` look as if it had these children, but keep every node that can stay, or what is focused, selected or
// scrolled in it would be lost. Which child is which: by data-key among those that have one, else by place.
// Listeners of `nodes` are not carried over. A fold stays as its reader has it; what is in a node with data-kept is
// left alone.
export function put(parent, ...nodes) {
  const keyed = new Map([...parent.childNodes].filter(keyOf).map((child) => [keyOf(child), child]));
  const keys = new Set(nodes.map(keyOf));
  for (const [key, child] of keyed) if (!keys.has(key)) child.remove();
  let place = parent.firstChild;
  for (const node of nodes) {
    const key = keyOf(node), old = key ? keyed.get(key) : keyOf(place) ? null : place;
    keyed.delete(key);
    if (!old || old.nodeName !== node.nodeName) {
      parent.insertBefore(node, place);
      continue;
    }
    if (old === place) place = place.nextSibling;
    else parent.insertBefore(old, place);
    if (!old.isEqualNode(node)) become(old, node);
  }
  while (place) [place] = [place.nextSibling, place.remove()];
}

const keyOf = (node) => node?.dataset?.key;

function become(old, node) {
  if (old.nodeType === Node.TEXT_NODE) {
    old.data = node.data;
    return;
  }
  const folds = (name) => name === "open" && old.nodeName === "DETAILS";
  for (const { name } of [...old.attributes]) if (!node.hasAttribute(name) && !folds(name)) old.removeAttribute(name);
  for (const { name, value } of node.attributes) {
    if (old.getAttribute(name) === value || folds(name)) continue;
    if (name === "style") old.style.cssText = value; // the attribute itself is what the page's policy forbids
    else old.setAttribute(name, value);
  }
  if (!("kept" in old.dataset)) put(old, ...node.childNodes);
}
