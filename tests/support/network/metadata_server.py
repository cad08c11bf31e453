"""Server that answers like the metadata services of AWS, Google Cloud and Azure."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

NAME = "worker-7"
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
NAME_PATH = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
TOKEN = "a-token-of-the-metadata-service=="


def preempt(name=NAME, event_type="Preempt", not_before="Mon, 19 Sep 2016 18:29:47 GMT"):
    """Return a scheduled event of Azure."""
    return {
        "EventId": "602d9444-d2cd-49c7-8624-8643e7171297",
        "EventType": event_type,
        "ResourceType": "VirtualMachine",
        "Resources": [name],
        "EventStatus": "Scheduled",
        "NotBefore": not_before,
    }


class MetadataServer:
    """Server on a free port of this machine, in a thread.

    Attributes:
        is_preempted: whether the machine will be taken away.
        asked: set when a request has been answered.
        answer: status, headers and body of every answer, in place of those of a cloud.
        address: host and port.
    """

    def __init__(self):
        self.is_preempted = False
        self.answer = None
        self.asked = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.address = f"127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error):
        self._server.shutdown()
        self._server.server_close()

    def respond(self, method, path, headers):
        """Return status, headers and body, as the clouds document them."""
        match method, path:
            case "PUT", "/latest/api/token" if 1 <= int(headers["X-aws-ec2-metadata-token-ttl-seconds"]) <= 21600:
                return 200, {}, TOKEN
            case "GET", "/latest/meta-data/spot/instance-action":
                if headers["X-aws-ec2-metadata-token"] != TOKEN:
                    return 401, {}, ""
                action = json.dumps({"action": "terminate", "time": "2017-09-18T08:22:00Z"})
                return (200, {}, action) if self.is_preempted else (404, {}, "<html>Not Found</html>")
            case "GET", "/computeMetadata/v1/instance/preempted":
                if headers["Metadata-Flavor"] != "Google":
                    return 403, {}, ""
                return 200, {"Metadata-Flavor": "Google"}, "TRUE" if self.is_preempted else "FALSE"
            case "GET", path if path == EVENTS and headers["Metadata"] == "true":
                # There is another machine of the scale set, whose end is not that of this one.
                events = [preempt("worker-8"), preempt(event_type="Reboot"), *[preempt()] * self.is_preempted]
                return 200, {}, json.dumps({"DocumentIncarnation": 1, "Events": events})
            case "GET", path if path == NAME_PATH and headers["Metadata"] == "true":
                return 200, {}, NAME
        return 400, {}, ""

    def _handler(self):
        def handle(handler):
            about = handler.command, handler.path, handler.headers
            status, headers, body = self.answer or self.respond(*about)
            body = body.encode() if isinstance(body, str) else body
            handler.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                if value is not None:
                    handler.send_header(name, value)
            handler.end_headers()
            handler.wfile.write(body)
            self.asked.set()

        return type(
            "Handler",
            (BaseHTTPRequestHandler,),
            {"do_GET": handle, "do_PUT": handle, "log_message": lambda *arguments: None},
        )
