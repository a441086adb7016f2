//! checklist
