"""Steps of an optimizer repeated elsewhere from gradients, bit for bit.

`calibrate.calibrate` finds an optimizer's arithmetic, `sender.GradientSender` encodes its gradients, and
`replica.Replica` repeats its steps.
"""
