//! Tensor parallel: layers whose weights lie on several devices.
