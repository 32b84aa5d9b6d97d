"""A verdict made visible: terminal, JSON, Markdown, HTML, CI formats, TensorBoard, routing statement."""
