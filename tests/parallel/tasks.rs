//! Tasks: order follows from what they read and write.
