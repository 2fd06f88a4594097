"""Live objects, as trees and tensors."""
