"""Recurrences: the batch alone, since a step needs all of the state before it."""

from __future__ import annotations

import torch

import autopar.ops.recurrent  # noqa: F401  defines the operators
from autopar.sharding.rule import OpCall, Rule, make_rule, rule
from autopar.sharding.rules.common import linear_args
from autopar.sharding.rules.registry import register

own = torch.ops.autopar


@register(own.lstm.default)
def lstm(call: OpCall) -> Rule:
    """(gates, h0, c0, weight, reverse) -> outputs, cells and gates"""
    return rule(call, "_ b _, b _, b _, _ _ -> _ b _, _ b _, _ b _")


@register(own.lstm_backward.default)
def lstm_backward(call: OpCall) -> Rule:
    """(grad_out, grad_cells, active, cells, c0, weight, reverse) -> gradients of gates, h0 and c0"""
    step = ((), ("b",), ())
    state = (("b",), ())
    operands = [step, step, step, step, state, ((), ())]
    return make_rule(call, operands, [step, state, state], linear=linear_args(call, (0, 1)))


@register(own.gru.default)
def gru(call: OpCall) -> Rule:
    """(gates, h0, weight, bias, reverse) -> outputs and gates"""
    return rule(call, "_ b _, b _, _ _, _ -> _ b _, _ b _")


@register(own.gru_backward.default)
def gru_backward(call: OpCall) -> Rule:
    """(grad_out, active, out, h0, weight, reverse) -> gradients of gates, of the states' part in them, and of h0"""
    return rule(call, "_ b _, _ b _, _ b _, b _, _ _ -> _ b _, _ b _, b _", linear=linear_args(call, (0,)))


@register(own.rnn.default)
def rnn(call: OpCall) -> Rule:
    """(gates, h0, weight, relu, reverse) -> outputs"""
    return rule(call, "_ b _, b _, _ _ -> _ b _")


@register(own.rnn_backward.default)
def rnn_backward(call: OpCall) -> Rule:
    """(grad_out, out, weight, relu, reverse) -> gradients of gates and h0"""
    return rule(call, "_ b _, _ b _, _ _ -> _ b _, b _", linear=linear_args(call, (0,)))
