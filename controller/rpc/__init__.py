"""The gRPC side: agents and gateways dial in here."""
