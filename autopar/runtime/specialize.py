from autopar.specialize import *
