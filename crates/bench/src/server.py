# The benchmark's workload: a small web server with the weight of a real one.
import asyncio, http.server, json, socketserver, sqlite3, ssl  # noqa: most are here for their memory

KNOWN = {f"key-{number}": {"number": number, "text": "x" * 20} for number in range(15_000)}
count = 0


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        global count
        count += self.path != "/readyz"
        body = json.dumps({"count": count, "known": len(KNOWN)}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def server_bind(self):
        # Not HTTPServer's, which asks the name service who we are and waits for an answer that may never come.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "actor", 80


Server(("0.0.0.0", 80), Handler).serve_forever()
