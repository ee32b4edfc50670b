"""What the package's three HTTP services share: the trajectory service, the policy server, and the control of a run.

`app.make_app` makes the FastAPI application, to which a service adds its endpoints; `serving.ServerThread` serves it.
A request passes, in this order:

1. `serving.BoundedProtocol`: connections are limited in number, and slow or silent clients are disconnected;
2. `app.MeasureRequests`: its duration, for `/metrics` (`RequestMetrics`);
3. `access.SameOrigin`: pages of other sites get 403, and so do other machines if the service has no token;
4. `app.Page`: a browser that asks for `/` gets the live page;
5. `access.RequireToken`: 401 without the bearer token;
6. `bodies.ReadBody`: the body is limited and decompressed;
7. the endpoint, whose answer `bodies.answer` encodes.
"""
