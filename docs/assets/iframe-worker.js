// Search from disk: browsers refuse workers on file: pages, so the worker's script runs in a hidden frame.
// The theme's search asks for window.IFrameWorker to find its language files.
if (location.protocol === "file:") {
  const load = (frame, url) =>
    new Promise((done, failed) => {
      const script = frame.contentDocument.createElement("script");
      script.src = url;
      script.onload = done;
      script.onerror = failed;
      frame.contentDocument.body.append(script);
    });

  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = frame.contentWindow;
      inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      inner.importScripts = async (...urls) => {
        for (const one of urls) await load(frame, one);
      };
      this.send = data => inner.dispatchEvent(new inner.MessageEvent("message", { data }));
      this.loaded = load(frame, new URL(url, location.href).href);
    }

    postMessage(data) {
      this.loaded.then(() => this.send(data));
    }

    terminate() {}
  };
}
