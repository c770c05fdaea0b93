// The server listens on every interface; the tests want it on this machine only, and to know its port.
const { Server } = require("node:net");
const listen = Server.prototype.listen;
Server.prototype.listen = function (port, ...rest) {
  this.once("listening", () => console.log(`listening on http://127.0.0.1:${this.address().port}/mcp`));
  return listen.call(this, Number(port), "127.0.0.1", ...rest);
};
