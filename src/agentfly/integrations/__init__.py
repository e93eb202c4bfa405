"""Other systems that AgentFly runs on. Each is imported only when it is asked for."""
