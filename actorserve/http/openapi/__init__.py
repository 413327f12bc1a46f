"""The OpenAPI document: written from the routes, the models of requests, and models of the answers."""
