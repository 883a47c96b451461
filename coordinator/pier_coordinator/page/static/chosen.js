// Which sites the charts show by themselves, and in which colour. Few sites: all of them.
export const MOST = 8;
const FEW = 8;

export class Chosen {
  constructor(onChange) {
    this.slots = new Array(MOST).fill(null);
    this.touched = false;
    this.onChange = onChange;
  }

  // Until somebody chooses, all sites are chosen when they are few.
  offer(sites) {
    if (this.touched) return;
    const wanted = sites.length <= FEW ? sites.map((site) => site.node) : [];
    const stale = this.nodes().some((node) => !wanted.includes(node));
    const missing = wanted.filter((node) => !this.slots.includes(node));
    if (!stale && !missing.length) return;
    this.slots = this.slots.map((node) => (wanted.includes(node) ? node : null));
    for (const node of missing) this.slots[this.slots.indexOf(null)] = node;
    this.onChange();
  }

  nodes() {
    return this.slots.filter((node) => node !== null);
  }

  slot(node) {
    return this.slots.indexOf(node);
  }

  // Says whether there was room for it.
  set(node, on) {
    this.touched = true;
    const at = this.slots.indexOf(on ? null : node);
    if (at < 0) return false;
    this.slots[at] = on ? node : null;
    this.onChange();
    return true;
  }
}
