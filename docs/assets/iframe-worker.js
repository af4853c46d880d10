// Search without a server. A page opened from a file may not start workers, so the script of one runs in a hidden frame.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    #frame = document.createElement("iframe");
    #ready;

    constructor(address) {
      super();
      this.#frame.hidden = true;
      document.body.append(this.#frame);
      const inside = this.#frame.contentWindow;
      const load = (from) => new Promise((done, failed) => {
        const script = inside.document.createElement("script");
        Object.assign(script, { src: from, onload: done, onerror: failed });
        inside.document.body.append(script);
      });
      inside.importScripts = async (...addresses) => { for (const each of addresses) await load(each); };
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.#ready = load(new URL(address, location.href).href);
    }

    postMessage(data) {
      const inside = this.#frame.contentWindow;
      this.#ready.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }

    terminate() {
      this.#frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
