"""The common parts of the three HTTP services: the trajectory service, the policy server and a run's control service.

`app.make_app` makes the FastAPI application, to which each service adds its endpoints. `serving.ServerThread` serves
the application. A request passes through these stages, in this order:

1. `serving.BoundedProtocol` limits the number of connections and disconnects clients that read or write too slowly.
2. `app.MeasureRequests` measures the duration for `/metrics` (`RequestMetrics`).
3. `access.SameOrigin` answers 403 to pages of other sites and, if the service has no token, to other machines.
4. `app.LivePage` sends the live page to a browser that requests `/`.
5. `access.RequireToken` answers 401 if the bearer token is missing.
6. `bodies.ReadBody` reads, limits and decompresses the body.
7. The endpoint runs, and `bodies.answer` encodes its response.
"""
